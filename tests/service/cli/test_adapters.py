"""`radixkv adapters` against a server without a model."""

from __future__ import annotations

import json

import pytest

from radixkv.service.cli.main import main
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine


def test_load_list_and_unload_print_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert run_cli(capsys, engine, "adapters", "load", "law", "0123456789abcdef") == (
        0,
        "law is loaded: 0123456789ab\n",
        "",
    )
    out = run_cli(capsys, engine, "adapters", "load", "law", "two")[1]
    assert out == "law is loaded: two, in place of 0123456789ab\n"
    head, row, summary = run_cli(capsys, engine, "adapters", "list")[1].splitlines()
    assert head.split() == ["adapter", "digest", "rank", "MB", "memory", "requests", "cached", "tokens", "state"]
    assert row.split() == ["law", "two", "8", "0.0", "device", "0", "0"]
    assert summary == "1 of at most 4 different adapters"
    assert run_cli(capsys, engine, "adapters", "unload", "law")[1] == "law is unloaded\n"
    assert engine.device.held == set()


def test_answers_are_json_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    loaded = json.loads(run_cli(capsys, engine, "adapters", "load", "law", "one", "--json")[1])
    assert (loaded["adapter"]["digest"], "replaced_digest" in loaded) == ("one", False)
    listed = json.loads(run_cli(capsys, engine, "adapters", "list", "--json")[1])
    assert (listed["max_adapters"], [each["name"] for each in listed["adapters"]]) == (4, ["law"])
    assert json.loads(run_cli(capsys, engine, "adapters", "unload", "law", "--json")[1]) == {}


def test_a_refusal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(capsys, FakeEngine(), "adapters", "unload", "law")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("radixkv: NOT_FOUND: adapter: expected")


def test_a_command_without_an_action_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["adapters"])
    assert ended.value.code == 2
    assert "ACTION" in capsys.readouterr().err
