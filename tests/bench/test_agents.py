"""Turns after tool calls are measured and summarized."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bench import agents
from bench.agents import Play, Prompts, Turn, medians_of, summarize, ttft_of_hits
from radixkv.errors import ConfigError
from radixkv.service.client import Awaits


def test_a_turn_is_ready_if_nothing_is_loaded_or_computed_again() -> None:
    assert Turn(100, 1.0, 0, 0).is_ready
    assert not Turn(100, 1.0, 64, 0).is_ready
    assert not Turn(100, 1.0, 0, 64).is_ready


def test_turns_are_compared_with_the_median_of_hits_of_the_same_length() -> None:
    control: Any = SimpleNamespace(turns=[Turn(100, each, 0, 0) for each in (1.0, 3.0, 2.0)] + [Turn(200, 5.0, 0, 0)])
    hits_s = ttft_of_hits(control)
    assert hits_s == {100: 2.0, 200: 5.0}
    turns = [Turn(100, 2.1, 0, 0), Turn(100, 2.4, 64, 0), Turn(100, 6.0, 0, 100), Turn(200, 4.5, 0, 0)]
    play: Any = SimpleNamespace(turns=turns, ttfts_s=[1.0, 2.0, 3.0], cached_tokens=80, prompt_tokens=100)
    result = summarize(play, hits_s)
    assert (result["returns"], result["ready_share"], result["timely_share"]) == (4, 0.5, 0.5)
    assert (result["loaded_tokens"], result["computed_again_tokens"], result["hit_rate"]) == (64, 100, 0.8)
    assert result["ttft_over_hit"] == {"p50": pytest.approx(1.125), "p95": 3.0}
    assert result["ttft_p50_s"] == 2.0


def test_each_number_of_the_result_is_the_median_over_all_rounds() -> None:
    rounds = [{"a": {"hit_rate": each, "time_model": {}}} for each in (0.1, 0.5, 0.2)]
    assert medians_of(rounds) == {"a": {"hit_rate": 0.2}}


def test_a_control_that_evicts_is_refused() -> None:
    control: Any = SimpleNamespace(turns=[Turn(100, 1.0, 0, 0), Turn(100, 1.0, 64, 0)])
    with pytest.raises(ConfigError, match="does not hold all sessions"):
        ttft_of_hits(control)


def test_turns_are_measured_without_requests_outside_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_PAUSE_S", 0)
    sent: list[tuple[int, dict[str, Any]]] = []  # the length and the options of each prompt

    class FakeClient:
        async def prefill(self, tokens: list[int], **options: Any) -> Any:
            sent.append((len(tokens), options))
            return SimpleNamespace(usage=SimpleNamespace(cached_tokens=len(tokens), host_tokens=0))

    client: Any = FakeClient()
    play = Play(client, Prompts(1), names_sessions=True, wait_s=0.001)
    asyncio.run(play.session("a", 100, 2, 0.0))
    named = {"session_id": "a", "awaits": Awaits.TOOL}
    assert sent == [(100, named), (260, named), (420, named)]
    assert [turn.context_tokens for turn in play.turns] == [100, 260]
