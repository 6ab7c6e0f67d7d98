"""Hits in vLLM with and without a tier are compared and counted; a fake worker imitates vLLM."""

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


class FakeWorker:
    """Answers with the number of the prompt. Answers to `wrong` prompts are wrong with a tier, after the first task."""

    def __init__(self, wrong: Set[int] = frozenset()) -> None:
        self._wrong = wrong
        self._cached_prompts: set[int] = set()
        self._killed = threading.Event()
        self._task: dict[str, Any] = {}
        self._num_tasks = 0

    def _answer(self, number: int) -> dict[str, Any]:
        is_wrong_in_tier = number in self._wrong and self._num_tasks > 1 and self._task["tier"] is not None
        is_changed = self._task.get("changed") is not None  # by the control, whose answers must differ
        cached = 32 if number in self._cached_prompts else 0
        self._cached_prompts.add(number)
        tokens = [number, int(is_wrong_in_tier or is_changed)]
        return {"prompt": number, "tokens": tokens, "logprobs": [float(number).hex()], "cached": cached, "took_s": 0.01}

    def run(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        self._task = task
        self._num_tasks += 1
        answers = [self._answer(number) for number in task["prompts"] for _ in range(task.get("times", 1))]
        return [*answers, {"counts": {}}]

    def start(self, task: dict[str, Any]) -> int:
        self._task = task
        self._num_tasks += 1
        self._killed.clear()
        return 1

    def kill(self, process_id: int, signal_number: int) -> None:
        assert (process_id, signal_number) == (1, signal.SIGKILL)
        self._killed.set()

    def answers(self) -> Iterator[dict[str, Any]]:
        yield from map(self._answer, self._task["prompts"])
        yield {"verified": True}
        number = -self._task["first_endless"]
        while not self._killed.is_set():
            yield self._answer(number)
            number -= 1


def test_equal_answers_after_a_restart_are_no_mistake(tmp_path: Path) -> None:
    result = measure_restart(cast("Worker", FakeWorker()), tmp_path, tmp_path, 20)
    assert result["prompt_tokens_cached_by_vllm"] == 20 * 32
    assert {result[name] for name in result if name.startswith("different")} == {0}
    assert result["control_changed_answers"] == "20 of 20"
    assert not has_wrong_answers(result, {"wrong_answers": 0})
    assert has_wrong_answers(result, {"wrong_answers": 1})


def test_different_answers_after_a_restart_are_counted(tmp_path: Path) -> None:
    result = measure_restart(cast("Worker", FakeWorker(wrong={3, 7})), tmp_path, tmp_path, 20)
    assert result["different_tokens_after_restart"] == 2
    assert result["different_tokens_without_tier"] == 0
    assert result["all_at_once"]["different_tokens"] == 2
    assert has_wrong_answers(result, {})
    assert has_wrong_answers({"all_at_once": result["all_at_once"]}, {})


@pytest.mark.parametrize("wrong", [set(), {-1}], ids=["all right", "one wrong"])
def test_wrong_answers_after_kills_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: set[int]
) -> None:
    worker = FakeWorker(wrong)
    monkeypatch.setattr(os, "kill", worker.kill)
    monkeypatch.setattr(vllm_tier, "_MAX_KILL_DELAY_S", 0.0)
    result = measure_kills(cast("Worker", worker), tmp_path, tmp_path, 5, seed=0)
    assert result["answers_verified"]
    assert bool(result["wrong_answers"]) is bool(wrong)
    assert result["answers_with_hits"] == result["answers_verified"]


def test_ten_prompts_share_a_document() -> None:
    assert prompt_of(0) == prompt_of(0) != prompt_of(1)
    assert prompt_of(0)[:256] == prompt_of(9)[:256] != prompt_of(10)[:256]
    assert len(prompt_of(-1)) == 1500
