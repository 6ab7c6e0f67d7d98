"""Kills a replica of a fleet under load, and checks the answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench.fleet.fleet_process import FleetProcess
from bench.fleet.grouped_prompts import Geometry, PromptOutcome, run_pass, summarize

MAX_RESTART_S = 180.0
"""Seconds that replicas may take to start."""


def kill_one(
    fleet: FleetProcess,
    geometry: Geometry,
    prompts: Sequence[Sequence[int]],
    before: Sequence[PromptOutcome],
    concurrency: int,
) -> dict[str, Any]:
    """Send all prompts again, and kill a replica when a third of them, and at least one, have ended.

    Args:
        fleet: the running fleet.
        geometry: sizes of the prompts.
        prompts: token ids.
        before: the outcomes of the same prompts in an earlier pass.
        concurrency: maximum number of prompts in flight.

    Returns:
        The result of `judge_kill`; `all_back_s`, the seconds from the kill until all replicas respond again, None if
        they did not; and the counts of the pass.
    """
    victim, *survivors = fleet.replicas()
    # Lists, so that the inner functions can set the values: each has one item as soon as the value is known.
    kill_times_s: list[float] = []
    restart_seconds: list[float] = []

    def watch() -> None:
        while time.monotonic() - kill_times_s[0] < MAX_RESTART_S:
            if len(set(fleet.replicas()) - {victim}) > len(survivors):  # the replacement has a new address
                restart_seconds.append(time.monotonic() - kill_times_s[0])
                return
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)

    def on_outcome(num_ended: int) -> None:
        if num_ended == max(1, len(prompts) // 3):
            kill_times_s.append(time.monotonic())
            fleet.kill(victim)
            watcher.start()

    start_s = time.monotonic()
    after = run_pass(fleet.address, prompts, geometry.new_tokens, concurrency, on_outcome)
    watcher.join()
    comparison = judge_kill(before, after, kill_times_s[0] - start_s)
    all_back_s = restart_seconds[0] if restart_seconds else None
    return {**comparison, "all_back_s": all_back_s, "pass": summarize(after, prompts)}


def judge_kill(before: Sequence[PromptOutcome], after: Sequence[PromptOutcome], kill_s: float) -> dict[str, Any]:
    """Compare the outcomes of a pass in which a replica was killed with those of an earlier pass.

    Args:
        before: outcomes of the earlier pass.
        after: outcomes of this pass, for the same prompts.
        kill_s: seconds from the start of the pass until the kill.
    """
    failed = [each for each in after if each.error]
    answered_s = sorted(each.sent_s + each.total_s for each in after if not each.error)
    # The first gap begins with the last answer before the kill, or with the kill if no answer precedes it.
    gaps_s = [later - earlier for earlier, later in pairwise([kill_s, *answered_s]) if later > kill_s]
    return {
        "requests": len(after),
        "under_way": sum(each.sent_s <= kill_s < each.sent_s + each.total_s for each in after),
        "failed_before_first_token": sum(not each.token_ids for each in failed),
        "ended_after_first_token": sum(bool(each.token_ids) for each in failed),
        "wrong_answers": sum(_is_wrong(*pair) for pair in zip(before, after, strict=True)),
        "longest_gap_s": max(gaps_s, default=None),
        "errors": sorted({each.error[:200] for each in failed}),
    }


def _is_wrong(before: PromptOutcome, after: PromptOutcome) -> bool:
    """Whether tokens differ from those of the earlier pass. A call that failed may have fewer tokens."""
    expected = before.token_ids[: len(after.token_ids)] if after.error else before.token_ids
    return after.token_ids != expected


def format_kill(result: dict[str, Any]) -> str:
    """Format the result of `kill_one` as a line."""
    restart = "never" if result["all_back_s"] is None else f"after {result['all_back_s']:.1f} s"
    return (
        f"one killed: {result['under_way']} calls in flight, {result['failed_before_first_token']} failed before their "
        f"first token, {result['ended_after_first_token']} after it, {result['wrong_answers']} wrong answers; longest "
        f"gap {result['longest_gap_s'] or 0:.2f} s; all replicas back {restart}"
    )
