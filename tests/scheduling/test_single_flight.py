"""Requests wait for tokens that another request is computing, instead of computing them as well."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.errors import DeadlinePassed
from radixkv.namespace import Namespace
from radixkv.scheduling import single_flight
from radixkv.scheduling.request import Request
from radixkv.scheduling.single_flight import SingleFlight
from tests.core_bench import BLOCK_SIZE, Bench, purge_at_once
from tests.fake_runner import next_token, tokens

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 40))]


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def num_distinct_prefixes(prompts: list[list[int]]) -> int:
    """Count the tokens to compute, if none is computed twice: the nodes of the trie of all prompts."""
    return len({tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt))})


def test_a_thousand_cold_requests_compute_their_prefix_once() -> None:
    bench = Bench(num_blocks=4096, max_step_tokens=512, max_running_requests=64)
    rng = random.Random(0)
    system = random_ids(rng, 128)
    prompts = [[*system, 1000 + i, *random_ids(rng, 7)] for i in range(1000)]
    futures = [bench.submit(prompt) for prompt in prompts]
    bench.run()
    assert bench.runner.computed_tokens == 128 + 1000 * 8
    assert [future.result(0).next_token_id for future in futures] == [next_token(tokens(p)) for p in prompts]
    assert sum(future.result(0).usage.computed_tokens for future in futures) == 128 + 1000 * 8


def test_followers_start_when_the_common_part_is_published_and_not_when_their_leader_ends() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=16)
    leader, follower = bench.submit(range(200)), bench.submit([*range(8), 250, 251])
    bench.core.step()
    assert bench.core.stats.load().requests.following == 0, (
        "the leader filled the step, so no other request was admitted"
    )
    bench.run()
    assert follower.result(0).usage.computed_tokens == 2
    assert leader.result(0).usage.computed_tokens == 200

    bench = Bench(num_blocks=256, max_step_tokens=32)
    bench.submit(range(24))
    follower = bench.submit([*range(8), 250, 251])
    bench.core.step()
    assert bench.core.stats.load().requests.following == 0, (
        "the tokens for which the follower waited were published with the step"
    )
    bench.core.step()
    assert follower.done()


def test_trees_of_followers_compute_every_shared_token_once() -> None:
    bench = Bench(num_blocks=1024, max_step_tokens=1000)
    system, documents = list(range(16)), [[100 + d] * 12 for d in range(3)]
    prompts = [[*system, *documents[q % 3], 200 + q, 0] for q in range(30)]
    futures = [bench.submit(prompt) for prompt in prompts]
    bench.run()
    # The last tokens of a prompt share no whole block with any other prompt.
    assert bench.runner.computed_tokens == 16 + 3 * 12 + 30 * 2
    assert all(
        future.result(0).next_token_id == next_token(tokens(p)) for future, p in zip(futures, prompts, strict=True)
    )


@pytest.mark.parametrize("length", [3, 4, 10, 12])
def test_equal_prompts_compute_one_prompt_and_one_token_each(length: int) -> None:
    bench = Bench()
    futures = [bench.submit(range(length)) for _ in range(10)]
    bench.run()
    assert bench.runner.computed_tokens == length + 9
    assert {future.result(0).next_token_id for future in futures} == {next_token(tokens(range(length)))}


def test_a_shared_prefix_that_ends_inside_a_block_is_waited_for_to_the_token() -> None:
    bench = Bench()
    bench.submit(range(12))
    follower = bench.submit([*range(7), 99, 98])
    bench.run()
    assert follower.result(0).usage.computed_tokens == 2


def test_less_than_a_block_is_not_worth_a_step() -> None:
    bench = Bench()
    futures = [bench.submit([1, 2, 3, last, 5, 6]) for last in (10, 20)]
    bench.core.step()
    assert all(future.done() for future in futures)


def test_no_request_waits_for_a_last_token_alone() -> None:
    bench = Bench()
    bench.prefill(range(10))
    futures = [bench.submit(range(10)) for _ in range(3)]
    bench.core.step()
    assert all(future.done() for future in futures)


@pytest.mark.parametrize(
    ("leader_options", "follower_options"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"read_cache": False}, {}),
        ({"write_cache": False}, {}),
        ({}, {"read_cache": False}),
    ],
    ids=["another tenant", "leader publishes at its end", "leader publishes nothing", "follower reads nothing"],
)
def test_requests_that_cannot_share_compute_alone(
    leader_options: dict[str, object], follower_options: dict[str, object]
) -> None:
    bench = Bench()
    futures = [bench.submit(range(12), **leader_options), bench.submit([*range(8), 99], **follower_options)]
    bench.core.step()
    assert all(future.done() for future in futures)
    assert bench.runner.computed_tokens == 12 + 9


def test_no_request_follows_one_that_publishes_nothing_after_a_purge() -> None:
    bench = Bench(max_step_tokens=4, max_running_requests=4)
    bench.submit(range(100, 104))
    revoked = bench.submit(range(40))
    purge_at_once(bench.core, tenant="")
    bench.core.step()
    bench.core.step()
    other = bench.submit([*range(20), 99])
    bench.core.step()
    bench.core.step()
    assert bench.core.stats.load().requests.following == 0
    bench.run()
    assert revoked.result(0).usage.written_tokens == 0
    assert other.result(0).usage.computed_tokens == 21


def cancel(bench: Bench, leader: Future[PrefillResult]) -> None:
    leader.cancel()


def pass_the_deadline(bench: Bench, leader: Future[PrefillResult]) -> None:
    bench.clock.now_s = 100.0


def fail_the_step(bench: Bench, leader: Future[PrefillResult]) -> None:
    bench.runner.fail_next = RuntimeError("device")


@pytest.mark.parametrize("end_leader", [cancel, pass_the_deadline, fail_the_step])
def test_a_follower_takes_over_where_its_leader_ended(
    end_leader: Callable[[Bench, Future[PrefillResult]], None],
) -> None:
    bench = Bench(max_step_tokens=6)
    leader = bench.submit(range(40), deadline_s=50.0)
    followers = [bench.submit([*range(36), 100 + i]) for i in range(3)]
    bench.core.step()
    end_leader(bench, leader)
    bench.run()
    if end_leader is pass_the_deadline:
        assert isinstance(leader.exception(0), DeadlinePassed)
    assert [follower.result(0).next_token_id for follower in followers] == [
        next_token(tokens([*range(36), 100 + i])) for i in range(3)
    ]
    assert sum(follower.result(0).usage.computed_tokens for follower in followers) <= 36 + 3
    assert bench.cache.pool.num_leased == 0


def request(ids: Sequence[int], tenant: str = "") -> Request:
    return Request(PrefillParams(tokens(ids)), Namespace("fake", tenant), Future(), 0.0)


def test_followers_resume_as_far_as_their_leader_has_published() -> None:
    flights = SingleFlight(BLOCK_SIZE)
    leader, near, far = request(range(40)), request([*range(8), 99]), request([*range(30), 99])
    flights.lead(leader)
    assert flights.follow(near, 0, 0)
    assert flights.record_published(leader, 4) == []
    assert flights.follow(far, 4, 4)
    assert flights.record_published(leader, 8) == [near]
    assert flights.record_published(leader, 28) == []
    assert flights.record_published(leader, 32) == [far], "tokens 28 and 29 are published with their block"
    assert flights.leave(leader) == []
    assert not flights.follow(near, 0, 0)


def test_a_leader_that_ends_frees_its_followers_but_not_one_that_ended_before() -> None:
    flights = SingleFlight(BLOCK_SIZE)
    leader, ended, waiting = request(range(40)), request([*range(8), 98]), request([*range(8), 99])
    flights.lead(leader)
    assert flights.follow(ended, 0, 0)
    assert flights.follow(waiting, 0, 0)
    assert flights.leave(ended) == []
    assert flights.leave(leader) == [waiting]
    assert flights.leave(leader) == []
    assert not flights.follow(waiting, 0, 0)


def test_one_of_two_leaders_of_a_prefix_may_leave_first() -> None:
    flights = SingleFlight(BLOCK_SIZE)
    first, second = request(range(12)), request(range(12))
    flights.lead(first)
    flights.lead(second)
    assert flights.leave(second) == []
    assert flights.follow(request(range(12)), 0, 0)
    flights.leave(first)


def test_requests_follow_by_tokens_and_not_by_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = SingleFlight(BLOCK_SIZE)
    leader = request(range(12))
    flights.lead(leader)
    flights.record_published(leader, 4)
    (fingerprint,) = flights._leaders
    monkeypatch.setattr(single_flight, "prefix_fingerprint", lambda *_: fingerprint)
    flights.lead(request(range(12), tenant="another"))
    assert flights.follow(request([*range(8), 99]), 4, 4)
    assert not flights.follow(request([*range(4), *range(50, 62)]), 4, 4)
    assert not flights.follow(request(range(50, 62)), 4, 4)
    assert not flights.follow(request([*range(8), 99], tenant="another"), 4, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_concurrent_requests_compute_each_shared_block_once(seed: int) -> None:
    """Prompts branch at the ends of blocks only, and nothing is evicted."""
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=2048, max_step_tokens=rng.choice((5, 16, 64, 500)), max_running_requests=rng.choice((1, 3, 50))
    )
    paths: list[list[int]] = [[]]
    for branch in range(30):
        paths.append([*rng.choice(paths), *([1000 + branch] * rng.choice((4, 8, 20)))])
    prompts = [[*rng.choice(paths), 5000 + i, *random_ids(rng, rng.randrange(6))] for i in range(60)]
    unsent = list(prompts)
    futures = []
    while unsent or bench.core.has_work:
        for _ in range(min(len(unsent), rng.randrange(20))):
            futures.append(bench.submit(unsent.pop()))
        bench.core.step()
        bench.cache.check()
    assert bench.runner.computed_tokens == num_distinct_prefixes(prompts)
    sent = reversed(prompts)
    assert [future.result(0).next_token_id for future in futures] == [next_token(tokens(p)) for p in sent]
    assert not bench.core._flights._waits
    assert not bench.core._flights._leaders


@pytest.mark.parametrize("seed", SEEDS)
def test_many_requests_that_are_cancelled_purged_and_failed_leave_no_follower_behind(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(num_blocks=100, max_step_tokens=rng.choice((5, 16, 64)), max_running_requests=rng.choice((2, 8)))
    stems = [random_ids(rng, 60) for _ in range(3)]
    futures = {}
    for i in range(150):
        prompt = [*rng.choice(stems)[: rng.randint(1, 60)], 5000 + i]
        options = {"tenant": rng.choice("ab"), "read_cache": rng.random() < 0.9, "write_cache": rng.random() < 0.9}
        futures[bench.submit(prompt, **options)] = prompt
        if rng.random() < 0.1:
            rng.choice(list(futures)).cancel()
        if rng.random() < 0.05:
            purge_at_once(bench.core, tenant=rng.choice("ab"))
        if rng.random() < 0.05:
            bench.runner.fail_next = RuntimeError("device")
        if rng.random() < 0.5:
            bench.core.step()
            bench.cache.check()
    bench.run()
    for future, prompt in futures.items():
        assert future.done()
        if not future.cancelled() and future.exception() is None:
            assert future.result(0).next_token_id == next_token(tokens(prompt))
    assert sum(not future.cancelled() and future.exception() is None for future in futures) > 50
    assert bench.cache.pool.num_leased == bench.cache.num_pinned_blocks == 0
    assert not bench.core._flights._waits
    assert not bench.core._flights._leaders
    assert not bench.core._flights._first_blocks
    assert not bench.core._flights._followers
