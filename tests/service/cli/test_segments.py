from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.api.retention import Retention
from radixkv.namespace import Namespace
from radixkv.service.cli.main import main
from tests.fakes import lease_text, publish, spell
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    publish(engine.cache, "abcdefgh", Namespace("model", "a"))
    publish(engine.cache, "abcdxy", Namespace("model", "a"))
    publish(engine.cache, "ab", Namespace("model", "", "", "salt"))
    return engine


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_a_table_says_how_large_and_how_used_each_segment_is(capsys, engine):
    cache, namespace = engine.cache, Namespace("model", "a")
    cache.retain(namespace, spell("abcd"), Retention(80, ttl_s=3599.0))
    with lease_text(cache, "abcdefghi", namespace):
        code, out, err = run_cli(capsys, engine, "segments", "--hottest", "--tenant", "a")
    assert (code, err) == (0, "")
    head, first, second, third, summary = rows(out)
    assert head == ["segment", "after", "tenant", "from", "tokens", "blocks", "uses", "idle", "heat", "state"]
    assert " ".join(first[2:]) == "a 0 4 1 2 0s 3.0 pinned by 1, retained at 80 for 60m"
    assert second[1:] == f"{first[0]} a 4 4 1 1 0s 2.0 pinned by 1".split()
    assert third[1:7] == f"{first[0]} a 4 2 1 0".split()
    assert " ".join(summary) == "3 segments, 3 examined"


def test_an_adapter_is_shown_by_its_names_or_by_its_digest_when_it_has_none(capsys):
    engine = FakeEngine()
    for digest in ("0123456789abcdef", "fedcba9876543210"):
        publish(engine.cache, "abcd", Namespace("model", "a", digest))
    engine.adapters.load_now("law", Path("0123456789abcdef"))
    engine.adapters.load_now("court", Path("0123456789abcdef"))
    printed = rows(run_cli(capsys, engine, "segments")[1])
    assert [" ".join(row[2:6]) for row in printed[1:3]] == ["a adapter law, court", "a adapter fedcba987654 0"]


def test_a_page_names_the_token_of_the_next_page(capsys, engine):
    first = rows(run_cli(capsys, engine, "segments", "--page-size", "3")[1])
    assert (len(first), " ".join(first[-1][:-2])) == (5, "3 of 4 segments, 3 examined; more with")
    second = rows(run_cli(capsys, engine, "segments", first[-1][-2], first[-1][-1])[1])
    assert second[1][2:4] == ["(none)", "+salt"]
    assert " ".join(second[-1]) == "1 of 4 segments, 1 examined"


def test_all_pages_come_in_one_table_or_one_object(capsys, engine):
    out = run_cli(capsys, engine, "segments", "--all", "--page-size", "1")[1]
    assert (len(rows(out)), " ".join(rows(out)[-1])) == (6, "4 of 4 segments, 4 examined")
    answer = json.loads(run_cli(capsys, engine, "segments", "--all", "--page-size", "1", "--json")[1])
    assert len({segment["segment_id"] for segment in answer["segments"]}) == 4
    assert (answer["next_page_token"], answer["compared_segments"]) == ("", 4)


def test_the_contents_of_a_store_are_listed_by_namespace(capsys, engine):
    engine.adapters.load_now("law", Path("0123456789abcdef"))
    for key, namespace in (
        (b"a", Namespace("model", "a", "0123456789abcdef", "salt")),
        (b"b", Namespace("model", "")),
        (b"c", Namespace("model", "")),
    ):
        engine.stored.add(key, namespace, 90 if key == b"b" else 50)
    head, first, second, summary = rows(run_cli(capsys, engine, "segments", "--store", "host", "--all")[1])
    assert head == ["tenant", "namespace", "blocks", "tokens", "retained"]
    assert (" ".join(first[:4]), first[5:]) == ("a +salt adapter law", ["1", "16", "0"])
    assert (second[0], second[2:]) == ("(none)", ["2", "32", "1"])
    assert " ".join(summary) == "2 of 2 namespaces, 2 examined"


@pytest.mark.parametrize("wrong", [["--store", "host"], ["--all"], ["--page-token", "1-1"]])
def test_inconsistent_options_are_refused_in_one_line(capsys, wrong):
    assert main(["segments", "--hottest", *wrong, "--address", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
