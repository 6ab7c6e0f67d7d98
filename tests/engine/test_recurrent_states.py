"""Requests of a model with recurrent states. The fake runner detects every state that is read or written wrongly."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from radixkv.api.miss_reason import MissReason
from radixkv.cache.recurrent_states import StateSlots
from radixkv.errors import RadixKVError, StepFailed
from radixkv.namespace import Namespace
from tests.core_bench import Bench, purge_at_once
from tests.fake_runner import next_token, tokens

PROMPT = range(30)  # whole blocks end at 28, and the first snapshot is kept at 16


def states_of(bench: Bench) -> StateSlots:
    assert bench.cache.state_slots is not None
    return bench.cache.state_slots


def snapshots(bench: Bench) -> list[int]:
    """Return the number of tokens of each snapshot."""
    states = states_of(bench)
    slots = [slot for slot in states.table.tolist() if slot >= 0]
    assert len(slots) == states.num_kept
    return sorted(len(bench.runner.states[slot][1]) // 4 for slot in slots)


def test_a_prompt_leaves_snapshots_and_the_next_one_resumes_from_the_last() -> None:
    bench = Bench(num_snapshots=8)
    cold, warm = bench.prefill(PROMPT), bench.prefill(PROMPT)
    assert snapshots(bench) == [16, 28]
    assert (cold.usage.cached_tokens, cold.miss_reason) == (0, MissReason.COLD)
    assert (warm.usage.cached_tokens, warm.miss_reason) == (28, MissReason.NONE)
    assert bench.runner.steps == [[(0, 30)], [(28, 30)]]


def test_the_snapshot_at_the_end_of_a_prompt_is_used_by_its_next_turn_only() -> None:
    bench = Bench(num_snapshots=8)
    bench.prefill(range(32))
    assert snapshots(bench) == [16, 28, 32]
    assert bench.prefill(range(32)).usage.cached_tokens == 28
    assert bench.prefill(range(40)).usage.cached_tokens == 32


def test_a_branch_gets_a_snapshot_the_second_time() -> None:
    bench = Bench(num_snapshots=8)
    bench.prefill(PROMPT)
    branches = [bench.prefill([*range(26), 100 + index, 101, 102]) for index in range(3)]
    assert [branch.usage.cached_tokens for branch in branches] == [16, 24, 24]
    assert [branch.miss_reason for branch in branches] == [
        MissReason.NO_STATE,
        MissReason.DIVERGED,
        MissReason.DIVERGED,
    ]
    assert states_of(bench).num_recomputed_tokens == 8


def test_a_prompt_without_a_snapshot_is_computed_and_says_why() -> None:
    bench = Bench(num_snapshots=0)
    bench.prefill(PROMPT)
    again = bench.prefill(PROMPT)
    assert (again.usage.cached_tokens, again.miss_reason) == (0, MissReason.NO_STATE)
    assert bench.core.probe(*_key(PROMPT)).miss_reason is MissReason.NO_STATE
    assert states_of(bench).num_recomputed_tokens == 28
    assert bench.cache.pool.num_published == 8, "the blocks of the second request are released"


def test_a_probe_returns_what_a_request_would_reuse() -> None:
    bench = Bench(num_snapshots=8)
    bench.prefill(PROMPT)
    probe = bench.core.probe(*_key([*range(26), 99, 99]))
    assert (probe.cached_tokens, probe.miss_reason) == (16, MissReason.NO_STATE)
    assert bench.core.probe(*_key(PROMPT)).cached_tokens == 28


def test_followers_resume_where_their_leader_kept_a_snapshot_for_them() -> None:
    bench = Bench(num_snapshots=8, max_step_tokens=8)
    futures = [bench.submit([*range(26), 100 + index, 101]) for index in range(4)]
    bench.run()
    assert [future.result(0).usage.cached_tokens for future in futures] == [0, 24, 24, 24]
    assert 24 in snapshots(bench)
    assert bench.runner.computed_tokens == 28 + 3 * 4


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    bench = Bench(num_snapshots=8, max_step_tokens=16)
    futures = [bench.submit(PROMPT) for _ in range(3)]
    bench.run()
    assert [future.result(0).usage.cached_tokens for future in futures] == [0, 28, 28]


def test_no_request_waits_for_a_leader_that_has_passed_its_position() -> None:
    bench = Bench(num_snapshots=8, max_step_tokens=8)
    leader = bench.submit(range(40))
    for _ in range(3):
        bench.core.step()
    late = bench.submit(range(28))  # resumes at 24 at most, and the leader is there already
    bench.core.step()
    assert bench.runner.steps[-1] == [(16, 20), (24, 28)]
    bench.run()
    assert [future.result(0).usage.cached_tokens for future in (leader, late)] == [0, 16]


def test_no_request_waits_for_a_snapshot_where_none_may_be_kept() -> None:
    bench = Bench(num_snapshots=0, max_step_tokens=64)
    futures = [bench.submit(PROMPT) for _ in range(2)]
    bench.run()
    assert bench.runner.steps == [[(0, 30), (0, 30)]]
    assert [future.result(0).usage.cached_tokens for future in futures] == [0, 0]


def test_two_requests_without_a_common_leader_share_nothing() -> None:
    """One request must not read the cache, so both compute the same prefix in one step."""
    bench = Bench(num_snapshots=8, max_step_tokens=64)
    futures = [bench.submit(PROMPT, read_cache=False), bench.submit(PROMPT)]
    bench.run()
    assert len(bench.runner.steps) == 1
    assert [future.result(0).usage.cached_tokens for future in futures] == [0, 0]
    assert snapshots(bench) == [16, 28]


def test_the_next_turn_resumes_after_the_output() -> None:
    bench = Bench(num_snapshots=8)
    future = bench.generate(PROMPT, 13)
    bench.run()
    assert snapshots(bench) == [16, 28, 40], "a generation keeps only its newest snapshot"
    turn = bench.prefill([*PROMPT, *future.result(0).token_ids, 7, 7])
    assert turn.usage.cached_tokens == 40


def test_a_preempted_generation_resumes_from_its_last_snapshot() -> None:
    bench = Bench(num_blocks=12, num_snapshots=8)
    futures = [bench.generate([*range(index, index + 9)], 14) for index in (0, 20, 40)]
    bench.run()
    assert sum(future.result(0).usage.recomputed_tokens for future in futures) > 0
    for future, start in zip(futures, (0, 20, 40), strict=True):
        ids = [*range(start, start + 9)]
        for token in future.result(0).token_ids:
            assert token == next_token(tokens(ids))
            ids.append(token)


def test_a_step_started_ahead_resumes_from_the_state_of_the_step_before() -> None:
    """The second request is preempted at the end of a block, and resumes from a snapshot with one token to compute."""
    bench = Bench(num_blocks=5, num_snapshots=8)
    futures = [bench.generate(range(start, start + 3), 6) for start in (0, 50)]
    bench.run()
    assert bench.core.stats.load().requests.pauses == 1
    assert [len(future.result(0).token_ids) for future in futures] == [6, 6]


@pytest.mark.parametrize("how", ["cancelled", "failed", "not finite"])
def test_a_request_that_fails_leaves_no_snapshot_of_its_step(how: str) -> None:
    bench = Bench(num_snapshots=8, max_step_tokens=18)
    prompt = [*range(40)]
    future = bench.submit(prompt)
    bench.core.step()
    bench.cache.check()
    assert snapshots(bench) == [16]
    if how == "cancelled":
        future.cancel()
    elif how == "failed":
        bench.runner.fail_next = RuntimeError("broken")
    else:
        bench.runner.not_finite = tokens(prompt)
    bench.run()
    if how != "cancelled":
        with pytest.raises(StepFailed):
            future.result(0)
    assert snapshots(bench) == [16]
    bench.runner.not_finite = None
    assert bench.prefill(prompt).usage.cached_tokens == 16


def test_a_step_for_which_there_was_no_memory_is_computed_again_from_the_same_states() -> None:
    bench = Bench(num_snapshots=8, max_step_tokens=64)
    bench.prefill(PROMPT)
    bench.runner.fail_next = torch.OutOfMemoryError("none left")
    assert bench.prefill([*range(26), *range(100, 129)]).next_token_id is not None
    assert snapshots(bench) == [16, 24, 28, 32, 48, 52]


def test_tenants_never_share_a_snapshot() -> None:
    bench = Bench(num_snapshots=16)
    bench.prefill(PROMPT, tenant="acme")
    assert bench.prefill(PROMPT, tenant="other").miss_reason is MissReason.COLD
    assert snapshots(bench) == [16, 16, 28, 28]
    purge_at_once(bench.core, tenant="acme")
    bench.cache.check()
    assert snapshots(bench) == [16, 28]
    assert bench.prefill(PROMPT, tenant="other").usage.cached_tokens == 28


def test_a_snapshot_is_evicted_with_its_block() -> None:
    bench = Bench(num_snapshots=8)
    bench.prefill(PROMPT)
    bench.cache.evict(2)
    bench.cache.check()
    assert snapshots(bench) == [16]
    again = bench.prefill(PROMPT)
    assert (again.usage.cached_tokens, again.miss_reason) == (16, MissReason.NO_STATE)


def test_a_request_that_must_not_write_leaves_no_snapshot() -> None:
    bench = Bench(num_snapshots=8)
    bench.prefill(PROMPT, write_cache=False)
    assert snapshots(bench) == []


def test_a_request_whose_namespace_was_purged_leaves_no_snapshot() -> None:
    bench = Bench(num_snapshots=8, max_step_tokens=12)
    future = bench.submit(range(40), tenant="acme")
    bench.core.step()
    purge_at_once(bench.core, tenant="acme")
    bench.run()
    assert future.result(0).next_token_id == next_token(tokens(range(40)))
    assert snapshots(bench) == []
    assert states_of(bench).take(1) is not None, "a slot is free"


def test_a_held_lease_releases_its_slot() -> None:
    bench = Bench(num_snapshots=2, max_running_requests=1)
    held = bench.prefill(PROMPT, hold_lease=True)
    assert held.held_lease is not None
    assert bench.prefill(range(50, 80)).usage.computed_tokens == 30


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(40))
def test_no_state_is_wrong_whatever_happens(seed: int) -> None:
    counts = walk(seed)
    assert counts["answers"] >= 15


@pytest.mark.long
def test_walks_cover_the_cases_that_they_are_for() -> None:
    counts = sum((walk(seed) for seed in range(100, 130)), Counter[str]())
    for event in ("hits", "no state", "evicted snapshots", "recomputed", "cancelled", "failed", "preempted", "purged"):
        assert counts[event], event


def walk(seed: int) -> Counter[str]:
    """Run random requests concurrently in a small cache. Returns the number of events of each kind.

    In one of three caches, two generations hardly fit: they preempt each other, and few other requests arrive.
    """
    rng = random.Random(seed)
    is_tight = seed % 3 == 0
    max_stem_tokens, generation_probability, arrival_probability = (0, 1.0, 0.2) if is_tight else (60, 0.4, 0.5)
    bench = Bench(
        num_blocks=rng.choice((6, 8)) if is_tight else rng.choice((24, 48, 200)),
        num_snapshots=rng.choice((0, 1, 3, 12, 100)),
        every_tokens=rng.choice((4, 12, 1000)),
        max_step_tokens=rng.choice((5, 17, 64)),
        max_running_requests=rng.choice((1, 3, 8)),
    )
    bench.runner.is_asynchronous = rng.random() < 0.5  # type: ignore[misc]
    stems = [[rng.randrange(250) for _ in range(70)] for _ in range(2)]
    counts: Counter[str] = Counter()
    submitted: list[tuple[list[int], Future[Any]]] = []
    while len(submitted) < 40 or bench.core.has_work:
        if len(submitted) < 40 and rng.random() < arrival_probability:
            submitted.append(
                _submit_random(bench, rng, [stem[:max_stem_tokens] for stem in stems], generation_probability)
            )
        event = rng.random()
        if event < 0.03 and submitted:
            counts["cancelled"] += rng.choice(submitted)[1].cancel()
        elif event < 0.05:
            bench.runner.fail_next = rng.choice((RuntimeError("broken"), torch.OutOfMemoryError("none left")))
            counts["failed"] += 1
        elif event < 0.08:
            bench.cache.evict(rng.randint(1, 6))
        elif event < 0.1:
            purge_at_once(bench.core, tenant=rng.choice(("a", "b")))
            counts["purged"] += 1
        bench.core.step()
        bench.cache.check()

    for ids, future in submitted:
        if future.cancelled():
            continue
        error = future.exception(0)
        if error is not None:
            assert isinstance(error, RadixKVError)
            assert "AssertionError" not in str(error), "the runner saw a wrong state"
            continue
        result = future.result(0)
        counts["answers"] += 1
        counts["hits"] += result.usage.cached_tokens > 0
        counts["no state"] += result.miss_reason is MissReason.NO_STATE
        counts["preempted"] += result.usage.recomputed_tokens > 0
        assert result.usage.cached_tokens % 4 == 0
        answer_ids = getattr(result, "token_ids", None) or (result.next_token_id,)  # of a generation, or of a prefill
        for token in answer_ids:
            assert token == next_token(tokens(ids))
            ids = [*ids, token]
    counts["evicted snapshots"] += states_of(bench).num_evicted
    counts["recomputed"] += states_of(bench).num_recomputed_tokens
    return counts


def _submit_random(
    bench: Bench, rng: random.Random, stems: list[list[int]], generation_probability: float
) -> tuple[list[int], Future[Any]]:
    """Submit a prefill or a generation of a prompt that begins with a stem. Returns its tokens and its future."""
    new_ids = [rng.randrange(250) for _ in range(rng.randint(1, 9))]
    ids = [*rng.choice(stems)[: rng.randint(0, 60)], *new_ids]
    options = {
        "tenant": rng.choice(("a", "a", "b")),
        "read_cache": rng.random() < 0.9,
        "write_cache": rng.random() < 0.9,
    }
    if rng.random() < generation_probability:
        return ids, bench.generate(ids, rng.randint(1, 20), **options)
    return ids, bench.submit(ids, **options)


def _key(ids: range | list[int]) -> tuple[Namespace, bytes]:
    return Namespace("fake"), tokens(ids)
