"""Tenants share the tokens of steps by weight, and the requests of a tenant share the part of the tenant."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future

import pytest

from radixkv.api.result import GenerateResult, PrefillResult
from radixkv.cache.tenants import Quota
from radixkv.errors import OutOfBlocks
from tests.core_bench import BLOCK_SIZE, Bench


def computed_by_tenant(bench: Bench) -> Counter[str]:
    """Return how many tokens of unfinished requests were computed so far."""
    counts: Counter[str] = Counter()
    for request in bench.core._scheduler.running:
        counts[request.tenant] += request.computed_upto - request.reuse.cached_tokens
    return counts


@pytest.mark.parametrize("weights", [{}, {"a": 2.0}, {"a": 0.5, "b": 3.0}])
def test_tenants_are_computed_in_proportion_to_their_weights(weights: dict[str, float]) -> None:
    bench = Bench(num_blocks=4096, max_step_tokens=512, weights=weights)
    for i, tenant in enumerate("abc"):
        bench.submit([i] * 5000, tenant=tenant)
    for _ in range(12):
        bench.core.step()
    computed = computed_by_tenant(bench)
    total_weight = sum(weights.get(tenant, 1.0) for tenant in "abc")
    for tenant in "abc":
        share = weights.get(tenant, 1.0) / total_weight
        assert computed[tenant] == pytest.approx(12 * 512 * share, abs=64 * 3)


def test_many_requests_of_one_tenant_get_as_large_a_share_as_one_request_of_another() -> None:
    bench = Bench(num_blocks=8192, max_step_tokens=256)
    crowd = [bench.submit([i] * 400, tenant="crowd") for i in range(50)]
    single = bench.submit(range(2000), tenant="single")
    while not single.done():
        bench.core.step()
    assert sum(future.done() for future in crowd) <= 2000 / 400 + 1
    bench.run()


def test_a_short_prompt_of_another_tenant_is_answered_in_the_step_after_it_arrived() -> None:
    bench = Bench(num_blocks=8192, max_step_tokens=128)
    for i in range(20):
        bench.submit([i] * 1000, tenant="busy")
    for _ in range(5):
        bench.core.step()
    short = bench.submit(range(64), tenant="other")
    bench.core.step()
    assert short.done()


def test_many_requests_of_one_adapter_do_not_delay_a_request_of_another_tenant() -> None:
    bench = Bench(num_blocks=8192, max_step_tokens=128)
    for i in range(20):
        bench.submit([i] * 1000, tenant="busy", adapter="flood")
    for _ in range(5):
        bench.core.step()
    short = bench.submit(range(64), tenant="other", adapter="single")
    bench.core.step()
    assert short.done()


def test_within_a_tenant_later_requests_of_one_adapter_do_not_overtake_those_of_another() -> None:
    bench = Bench(num_blocks=8192, max_step_tokens=128, max_running_requests=2)
    before = [bench.submit([i] * 200, adapter="flood") for i in range(10)]
    single = bench.submit([100] * 200, adapter="single")
    after = [bench.submit([101 + i] * 200, adapter="flood") for i in range(50)]
    while not single.done():
        bench.core.step()
    assert all(future.done() for future in before)
    assert sum(future.done() for future in after) <= 1  # of two that run, one may end in the same step
    bench.run()


def test_idle_time_earns_no_share() -> None:
    """A tenant that returns repeatedly is not served before one that stays."""
    bench = Bench(num_blocks=8192, max_step_tokens=128)
    bench.submit([9] * 6000, tenant="stays")
    shorts: list[Future[PrefillResult]] = []
    for _ in range(30):
        if not shorts or shorts[-1].done():
            shorts.append(bench.submit([len(shorts)] * 100, tenant="returns"))
        bench.core.step()
    assert computed_by_tenant(bench)["stays"] >= 30 * 64 - 128, "half of each step of 128 tokens"


def test_a_tenant_that_returns_is_still_charged_for_earlier_requests() -> None:
    """A tenant of low weight gets no more than its share by sending one short request at a time."""
    bench = Bench(num_blocks=8192, max_step_tokens=64, weights={"returns": 0.1})
    bench.submit([9] * 6000, tenant="stays")
    shorts: list[Future[PrefillResult]] = []
    for _ in range(66):
        if not shorts or shorts[-1].done():
            shorts.append(bench.submit([1000 + len(shorts)] * 64, tenant="returns"))
        bench.core.step()
    share = 1 / (1 + 0.1)
    assert computed_by_tenant(bench)["stays"] == pytest.approx(66 * 64 * share, abs=128)


def test_decoding_is_charged_too() -> None:
    bench = Bench(num_blocks=8192, max_step_tokens=128, max_running_requests=64)
    for i in range(32):
        bench.generate([i] * 4, 400, tenant="decodes")
    for _ in range(6):
        bench.core.step()
    bench.submit([99] * 5000, tenant="prefills")
    bench.submit([98] * 5000, tenant="decodes")
    for _ in range(20):
        bench.core.step()
    computed = computed_by_tenant(bench)
    assert computed["prefills"] == pytest.approx(20 * 64, abs=64 * 2), "half of each step of 128 tokens"


def test_cache_hits_do_not_affect_the_shares_of_tenants() -> None:
    """The order in which tenants are served must not reveal what another tenant has cached."""
    orders = []
    for is_cached in (False, True):
        bench = Bench(num_blocks=1024, max_step_tokens=64, max_running_requests=1)
        if is_cached:
            bench.prefill(range(600, 700), tenant="b")
        first = bench.submit(range(300, 400), tenant="a")
        second = bench.submit(range(600, 700), tenant="b")
        bench.core.step()
        running = bench.core._scheduler.running
        orders.append([request.tenant for request in running])
        bench.run()
        assert first.done()
        assert second.done()
    assert orders == [["a"], ["a"]]


def order_of_completion(bench: Bench, futures: list[Future[PrefillResult]]) -> list[int]:
    """Run all steps, and return the indices of the futures in the order in which they were done."""
    order: list[int] = []
    while bench.core.has_work:
        bench.core.step()
        order += [i for i, future in enumerate(futures) if future.done() and i not in order]
    return order


def test_within_a_tenant_the_longest_cached_prefix_is_admitted_first() -> None:
    bench = Bench(num_blocks=1024, max_step_tokens=64, max_running_requests=1)
    bench.prefill(range(100, 150))
    bench.prefill(range(200, 240))
    futures = [bench.submit([*prompt, 7]) for prompt in (range(50), range(200, 250), range(100, 150), range(50, 100))]
    assert order_of_completion(bench, futures) == [2, 1, 0, 3]


def test_no_request_is_passed_over_more_than_sixteen_times() -> None:
    bench = Bench(num_blocks=1024, max_step_tokens=64, max_running_requests=1)
    bench.prefill(range(100, 150))
    cold = bench.submit(range(50))
    num_hits = 0
    while not cold.done():  # more hits arrive than one step answers
        for _ in range(2):
            bench.submit([*range(100, 150), num_hits])
            num_hits += 1
        bench.core.step()
    assert len(bench.runner.steps) <= 1 + 16 + 2


def test_a_point_of_urgency_counts_as_a_second_of_waiting() -> None:
    bench = Bench(num_blocks=1024, max_step_tokens=64, max_running_requests=1)
    bench.submit(range(900, 964))
    bench.core.step()
    futures = [bench.submit([i] * 64, urgency=50) for i in range(2)]
    bench.clock.now_s = 10.0
    futures += [bench.submit([9] * 64, urgency=59), bench.submit([10] * 64, urgency=61), bench.submit([11] * 64)]
    futures += [bench.submit([12] * 64, urgency=0)]
    assert order_of_completion(bench, futures) == [3, 0, 1, 2, 4, 5]


def test_urgency_has_no_effect_between_tenants() -> None:
    bench = Bench(num_blocks=4096, max_step_tokens=256)
    bench.submit([1] * 5000, tenant="loud", urgency=100)
    bench.submit([2] * 5000, tenant="quiet", urgency=0)
    for _ in range(10):
        bench.core.step()
    computed = computed_by_tenant(bench)
    assert computed["quiet"] == pytest.approx(computed["loud"], abs=128)


def test_a_leader_is_as_urgent_as_its_followers() -> None:
    """A short request that follows a long one does not wait for requests that are shorter than the long one."""
    bench = Bench(num_blocks=4096, max_step_tokens=64)
    system = list(range(60))
    bench.submit([5000] * 2000)
    bench.core.step()
    leader = bench.submit([*system, *[6000] * 940])
    bench.core.step()
    shorter, follower = bench.submit([7000] * 300), bench.submit([*system, 1, 2])
    bench.core.step()
    assert bench.core.stats.load().requests.following == 1
    bench.core.step()
    bench.core.step()
    assert follower.done()
    assert not shorter.done()
    assert not leader.done()


def test_a_tenant_that_arrives_late_gets_no_compensation() -> None:
    bench = Bench(num_blocks=4096, max_step_tokens=128)
    bench.submit([1] * 5000, tenant="early")
    for _ in range(10):
        bench.core.step()
    before = computed_by_tenant(bench)["early"]
    bench.submit([2] * 5000, tenant="late")
    for _ in range(10):
        bench.core.step()
    assert computed_by_tenant(bench)["early"] - before >= 10 * 64 - 128


def test_a_large_request_gets_its_blocks_although_small_generations_keep_arriving() -> None:
    bench = Bench(num_blocks=40, max_step_tokens=64, max_running_requests=8)
    for i in range(4):
        bench.generate([i] * 8, 20, tenant="small")
    bench.core.step()
    big = bench.submit(range(34 * BLOCK_SIZE), tenant="big")
    smalls: list[Future[GenerateResult]] = []
    while not big.done():
        smalls.append(bench.generate([100 + len(smalls)] * 8, 20, tenant="small"))
        bench.core.step()
        bench.cache.check()
    assert len(bench.runner.steps) < 60
    bench.run()


@pytest.mark.parametrize("seed", range(20))
def test_no_request_starves(seed: int) -> None:
    """More requests arrive than can be served; the least urgent one is answered nevertheless."""
    rng = random.Random(seed)
    bench = Bench(num_blocks=64, max_step_tokens=16, max_running_requests=6)
    least_urgent = bench.submit(range(1000, 1100), tenant="a", urgency=20)
    num_steps = 0
    while not least_urgent.done():
        for _ in range(3):
            ids = [rng.randrange(4), *[rng.randrange(4)] * rng.randrange(1, 30)]
            tenant, urgency = rng.choice("abc"), rng.choice((20, 50, 80))
            if rng.random() < 0.5:
                bench.generate(ids, rng.randrange(1, 12), tenant=tenant, urgency=urgency)
            else:
                bench.submit(ids, tenant=tenant, urgency=urgency)
        bench.clock.now_s += 1.0
        bench.core.step()
        num_steps += 1
        assert num_steps < 400
    assert bench.core.stats.load().requests.waiting > 20, "more requests arrived than could be served"


@pytest.mark.parametrize("num_names", [100, 100_000], ids=["tenants come back", "tenants are always new"])
def test_tenants_that_keep_arriving_do_not_starve_one_that_stays(num_names: int) -> None:
    bench = Bench(num_blocks=8192, max_step_tokens=256)
    long = bench.submit([1] * 2000, tenant="stays")
    num_shorts = 0
    while not long.done():
        for _ in range(4):  # together as many tokens as a step has
            ids = [2 + num_shorts % 200] * 64
            bench.submit(ids, tenant=f"tenant {num_shorts % num_names}", read_cache=False, write_cache=False)
            num_shorts += 1
        bench.core.step()
        assert len(bench.runner.steps) < 300


def test_a_request_of_a_tenant_with_all_slots_is_preempted_for_a_tenant_with_none() -> None:
    bench = Bench(num_blocks=4096, max_step_tokens=64, max_running_requests=4)
    greedy = [bench.generate([i] * 4, 100, tenant="greedy") for i in range(6)]
    for _ in range(5):
        bench.core.step()
    other = bench.submit(range(50, 54), tenant="other")
    bench.core.step()
    bench.core.step()
    assert other.done()
    assert bench.core.stats.load().requests.pauses == 1
    bench.run()
    assert all(len(future.result(0).token_ids) == 100 for future in greedy)


def test_a_place_is_left_for_a_tenant_without_running_requests() -> None:
    bench = Bench(num_blocks=4096, max_running_requests=2, weights={"greedy": 100.0})
    bench.generate([1] * 4, 100, tenant="greedy")
    served = bench.submit([9] * 64, tenant="other")  # so that the turn of "greedy" comes first
    while not served.done():
        bench.core.step()
    bench.generate([2] * 4, 100, tenant="greedy")
    bench.generate([3] * 4, 100, tenant="other")
    for _ in range(3):
        bench.core.step()
    assert {request.tenant for request in bench.core._scheduler.running} == {"greedy", "other"}
    assert bench.core.stats.load().requests.pauses == 0


def test_tenants_share_the_tokens_of_decoding_requests_too() -> None:
    bench = Bench(num_blocks=4096, max_step_tokens=4, max_running_requests=16)
    many = [bench.generate([i] * 2, 300, tenant="many") for i in range(9)]
    single = bench.generate([50] * 2, 300, tenant="single")
    while not (single.streamed and all(future.streamed for future in many)):
        bench.core.step()
    streamed_before = len(single.streamed)
    for _ in range(50):
        bench.core.step()
    assert len(single.streamed) - streamed_before == 50, (
        "the single request gets a token in each step: two are the share of its tenant"
    )


def test_more_decoding_requests_than_tokens_take_turns_and_leave_some_for_prompts() -> None:
    bench = Bench(num_blocks=4096, max_step_tokens=4, max_running_requests=16)
    decoding = [bench.generate([i] * (300 if i == 5 else 2), 200, tenant="a") for i in range(8)]
    while not all(future.streamed for future in decoding):
        bench.core.step()
    streamed_before = [len(future.streamed) for future in decoding]
    for _ in range(40):
        bench.core.step()
    prompt = bench.submit(range(100, 120), tenant="b")
    for _ in range(12):
        bench.core.step()
    assert prompt.done()
    progress = [len(future.streamed) - before for future, before in zip(decoding, streamed_before, strict=True)]
    assert max(progress) - min(progress) <= 2
    assert min(progress) > 10


def test_urgency_does_not_decide_which_tenant_is_preempted() -> None:
    results = []
    for urgency in (50, 100):
        bench = Bench(num_blocks=10)
        quiet = bench.generate(range(8), 24, tenant="quiet")
        bench.clock.now_s = 1.0
        loud = bench.generate(range(50, 58), 24, tenant="loud", urgency=urgency)
        bench.run()
        was_quiet_preempted = quiet.result(0).usage.recomputed_tokens > 0
        was_loud_preempted = loud.result(0).usage.recomputed_tokens > 0
        results.append((was_quiet_preempted, was_loud_preempted))
    assert results == [(False, True)] * 2


def test_a_request_that_needs_blocks_protected_by_floors_fails_instead_of_waiting() -> None:
    bench = Bench(num_blocks=40, quotas={"floored": Quota(floor_blocks=30)}, max_step_tokens=512)
    bench.prefill(range(120), tenant="floored")
    bench.has_pending_calls = True
    decoding = bench.generate(range(4), 10, tenant="decodes")
    bench.core.step()
    big = bench.submit(range(300, 300 + 15 * BLOCK_SIZE), tenant="big")
    bench.core.step()
    assert isinstance(big.exception(0), OutOfBlocks)
    small = bench.submit([7], tenant="small")
    bench.core.step()
    assert small.done()
    assert not decoding.done()
    bench.run()
