from __future__ import annotations

from typing import Any

import pytest

from bench.fleet import killing
from bench.fleet.grouped_prompts import Geometry, PromptOutcome
from bench.fleet.killing import judge_kill, kill_one


def test_answers_during_a_kill_are_judged() -> None:
    before = [PromptOutcome(0.0, 0.1, 1.0, (1, 2, 3), 0)] * 5
    after = [
        PromptOutcome(0.0, 0.1, 0.5, (1, 2, 3), 0),
        PromptOutcome(0.5, 0.1, 1.5, (1, 2), 0, "cut"),
        PromptOutcome(0.5, None, 1.5, (), 0, "refused"),
        PromptOutcome(0.5, 0.1, 3.5, (1, 2, 3), 0),
        PromptOutcome(5.0, 0.1, 1.0, (1, 9, 3), 0),
    ]
    judged = judge_kill(before, after, 1.0)  # the replica was killed after one second
    assert (judged["requests"], judged["under_way"]) == (5, 3)
    assert (judged["failed_before_first_token"], judged["ended_after_first_token"]) == (1, 1)
    assert (judged["wrong_answers"], judged["longest_gap_s"]) == (1, 3.5)
    assert judged["errors"] == ["cut", "refused"]


@pytest.mark.parametrize(("num_prompts", "num_before_kill"), [(1, 1), (2, 1), (3, 1), (9, 3)])
def test_a_replica_is_killed_after_a_third_of_the_prompts(
    num_prompts: int, num_before_kill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = PromptOutcome(0.0, 0.1, 0.2, (1,), 0)
    num_ended_at_kill: list[int] = []
    num_ended = 0

    class FakeFleet:
        """Replaces a replica as soon as it is killed."""

        address = "ingress"

        def replicas(self) -> list[str]:
            return ["b", "c"] if num_ended_at_kill else ["a", "b"]

        def kill(self, address: str) -> None:
            assert address == "a"
            num_ended_at_kill.append(num_ended)

    def run_pass(address: str, prompts: Any, new_tokens: int, concurrency: int, on_outcome: Any) -> list[PromptOutcome]:
        nonlocal num_ended
        for num_ended in range(1, len(prompts) + 1):
            on_outcome(num_ended)
        return [outcome] * len(prompts)

    monkeypatch.setattr(killing, "run_pass", run_pass)
    fleet: Any = FakeFleet()
    result = kill_one(fleet, Geometry(1, 1, 1, 1, 1), [[1]] * num_prompts, [outcome] * num_prompts, 1)
    assert num_ended_at_kill == [num_before_kill]
    assert (result["requests"], result["wrong_answers"], result["pass"]["errors"]) == (num_prompts, 0, 0)
    assert result["all_back_s"] is not None
