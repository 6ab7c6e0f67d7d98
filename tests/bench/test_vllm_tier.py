"""The comparison of hits in vLLM counts what it should, with a stand-in for vLLM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, cast

import pytest

from bench import vllm_tier
from bench.parts.vllm_tier_worker import prompt_of
from bench.vllm_tier import Worker, has_wrong_answers, measure_kills, measure_restart


class StandIn:
    """Answers with the number of the prompt; some are wrong with a tier, after the first task."""

    def __init__(self, wrong: Set[int] = frozenset()) -> None:
        self._wrong = wrong
        self._known: set[int] = set()
        self._killed = threading.Event()
        self._task: dict[str, Any] = {}
        self._num_tasks = 0

    def _answer(self, number: int) -> dict[str, Any]:
        is_wrong = number in self._wrong and self._num_tasks > 1 and self._task["tier"] is not None
        is_wrong = is_wrong or self._task.get("changed") is not None
        cached = 32 if number in self._known else 0
        self._known.add(number)
        tokens = [number, int(is_wrong)]
        return {"prompt": number, "tokens": tokens, "logprobs": [float(number).hex()], "cached": cached, "took_s": 0.01}

    def run(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        self._task = task
        self._num_tasks += 1
        return [self._answer(each) for each in task["prompts"] for _ in range(task.get("times", 1))] + [{"counts": {}}]

    def start(self, task: dict[str, Any]) -> int:
        self._task = task
        self._num_tasks += 1
        self._killed.clear()
        return 1

    def kill(self, process_id: int, number: int) -> None:
        assert (process_id, number) == (1, signal.SIGKILL)
        self._killed.set()

    def answers(self) -> Iterator[dict[str, Any]]:
        yield from map(self._answer, self._task["prompts"])
        yield {"verified": True}
        number = -self._task["first_endless"]
        while not self._killed.is_set():
            yield self._answer(number)
            number -= 1


def test_restarts_without_differences(tmp_path: Path) -> None:
    result = measure_restart(cast("Worker", StandIn()), tmp_path, tmp_path, 20)
    assert result["prompt_tokens_cached_by_vllm"] == 20 * 32
    assert {result[name] for name in result if name.startswith("different")} == {0}
    assert result["control_changed_answers"] == "20 of 20"
    assert not has_wrong_answers(result, {"wrong_answers": 0})
    assert has_wrong_answers(result, {"wrong_answers": 1})


def test_different_answers_after_a_restart_are_counted(tmp_path: Path) -> None:
    result = measure_restart(cast("Worker", StandIn(wrong={3, 7})), tmp_path, tmp_path, 20)
    assert result["different_tokens_after_restart"] == 2
    assert result["different_tokens_without_tier"] == 0
    assert result["all_at_once"]["different_tokens"] == 2
    assert has_wrong_answers(result, {})
    assert has_wrong_answers({"all_at_once": result["all_at_once"]}, {})


@pytest.mark.parametrize("wrong", [set(), {-1}])
def test_wrong_answers_after_kills_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: set[int]
) -> None:
    worker = StandIn(wrong)
    monkeypatch.setattr(os, "kill", worker.kill)
    monkeypatch.setattr(vllm_tier, "_MAX_DELAY_S", 0.0)
    result = measure_kills(cast("Worker", worker), tmp_path, tmp_path, 5, seed=0)
    assert result["answers_verified"]
    assert bool(result["wrong_answers"]) is bool(wrong)
    assert result["answers_with_hits"] == result["answers_verified"]


def test_prompts_share_documents_in_tens() -> None:
    assert prompt_of(0) == prompt_of(0) != prompt_of(1)
    assert prompt_of(0)[:256] == prompt_of(9)[:256] != prompt_of(10)[:256]
    assert len(prompt_of(-1)) == 1500
