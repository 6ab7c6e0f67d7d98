from __future__ import annotations

from bench.fleet.grouped_prompts import PromptOutcome
from bench.fleet.killing import judge_kill


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
