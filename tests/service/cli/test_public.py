"""`radixkv public` against a server without a model."""

from __future__ import annotations

import json

import pytest

from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine


def test_add_list_and_remove_print_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert run_cli(capsys, engine, "public", "add", "system", "--text", "be kind", "--bytes") == (
        0,
        "system is public: 7 tokens in 2 blocks\n",
        "",
    )
    head, row = run_cli(capsys, engine, "public", "list")[1].splitlines()
    assert head.split() == ["public", "prefix", "tokens", "blocks", "adapter", "users", "uses", "state"]
    assert row.split() == ["system", "7", "2", "0", "0"]
    assert run_cli(capsys, engine, "public", "remove", "system")[1] == (
        "system is no longer public: 7 tokens in 2 blocks, freed\n"
    )
    assert len(run_cli(capsys, engine, "public", "list")[1].splitlines()) == 1


def test_answers_are_json_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    added = json.loads(run_cli(capsys, engine, "public", "add", "p", "--tokens", "1,2,3,4", "--json")[1])
    assert (added["name"], added["tokens"], added["is_computed"]) == ("p", 4, True)
    assert json.loads(run_cli(capsys, engine, "public", "list", "--json")[1])["public_prefixes"] == [added]
    assert json.loads(run_cli(capsys, engine, "public", "remove", "p", "--json")[1])["name"] == "p"


def test_a_refusal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(capsys, FakeEngine(), "public", "remove", "p")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("radixkv: NOT_FOUND: name: expected")
