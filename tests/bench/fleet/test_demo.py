from __future__ import annotations

import importlib.util
import re

import pytest

from bench.fleet import demo


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
def test_every_prompt_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    status = demo.main([])
    lines = capsys.readouterr().out.splitlines()
    assert (status, len(lines)) == (0, 11), lines
    assert re.search(r"ROUTED_BY_PREFIX, 816 tokens cached", lines[3])
    assert re.search(r"40 answers, 0 errors, [6-9]\d% of prompt tokens cached", lines[4])
    assert re.search(r"768 of 832 prompt tokens cached: the same answer", lines[6])
    assert "40 answers, 0 errors" in lines[8]
    assert lines[10].endswith("every prompt was answered")


def test_no_two_conversations_share_a_prefix() -> None:
    """Each step of the demo uses its own conversations. Those before the talk have negative numbers."""
    conversations = range(-2, demo._NUM_CONVERSATIONS)
    prefixes = {tuple(demo._prompt(conversation, 0)[:16]) for conversation in conversations}
    assert len(prefixes) == len(conversations)


def test_a_fleet_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_SETTINGS", ("cache.block_size=7",))
    assert demo.main([]) == 2
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert "cache.block_size: expected one of 16, 32, 64, got 7" in err
