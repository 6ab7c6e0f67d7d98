"""The plan of one step, without a scheduler, a cache or an engine."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import cast

import pytest

from radixkv.api.caller import Caller
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.namespace import Namespace
from radixkv.scheduling.admission import Admission, Admitter
from radixkv.scheduling.request import Generation, Request
from radixkv.scheduling.step_plan import Slice, StepPlan
from radixkv.scheduling.tenant_queue import TenantQueues
from tests.fake_runner import tokens

COMPRESSION = Compression(CompressionPolicy.STREAMING_LLM, 8)


class FakeAdmitter:
    """Stands in for `Admitter`: admits every request except those with another outcome, without a cache.

    Attributes:
        outcomes: the outcome of each request that is not admitted.
        cached_tokens, num_nodes: the results of the lookup of each request; 0 by default.
        tried: the requests of all calls of `admit`, in order.
        num_lookups: number of calls of `look_up`.
        worked_s: the CPU time of all admissions and lookups.
        admit_s, lookup_s: the CPU time of one admission, and of one lookup.
    """

    def __init__(self) -> None:
        self.worked_s = self.admit_s = self.lookup_s = 0.0
        self.outcomes: dict[Request, Admission] = {}
        self.cached_tokens: dict[Request, int] = {}
        self.tried: list[Request] = []
        self.num_nodes: dict[Request, int] = {}
        self.num_lookups = 0

    def look_up(self, request: Request) -> tuple[int, int]:
        self.num_lookups += 1
        self.worked_s += self.lookup_s
        return self.cached_tokens.get(request, 0), self.num_nodes.get(request, 0)

    def urgent_tokens(self, request: Request) -> int:
        return request.num_left

    def admit(
        self, request: Request, cached_tokens: int | None, running: Collection[Request], *, ends_with_step: bool
    ) -> Admission:
        self.tried.append(request)
        self.worked_s += self.admit_s
        request.computed_upto = cached_tokens or 0
        request.num_nodes = self.num_nodes.get(request, 0)
        return self.outcomes.get(request, Admission.ADMITTED)


class PlanBench:
    """The queues and the running requests between steps, and an admitter."""

    def __init__(self, max_tokens: int = 16, max_running_requests: int = 8, **weights: float) -> None:
        self.queues = TenantQueues(weights)
        self.running: dict[Request, None] = {}
        self.blocked: Request | None = None
        self.admitter = FakeAdmitter()
        self._max_tokens = max_tokens
        self._max_running_requests = max_running_requests

    def add_waiting(self, num_tokens: int, tenant: str = "", compression: Compression | None = None) -> Request:
        """Add a waiting request."""
        params = PrefillParams(tokens([7] * num_tokens), Caller(tenant))
        generation = None
        if compression is not None:
            generation = Generation(Sampling(9, compression=compression), frozenset(), lambda _: None)
        request = Request(params, Namespace("", tenant), Future(), 0.0, generation)
        request.set_arrival(sum(len(queue.requests()) for queue in self.queues))
        self.queues.open(tenant).waiting.add(request)
        return request

    def add_running(
        self, num_tokens: int, computed_upto: int, tenant: str = "", compression: Compression | None = None
    ) -> Request:
        """Add a running request. It decodes if it has one token left, and is otherwise still in its prefill."""
        request = self.add_waiting(num_tokens, tenant, compression)
        queue = self.queues[tenant]
        queue.waiting.remove(request)
        queue.running.add(request)
        self.running[request] = None
        request.computed_upto = computed_upto
        request.times.prefilled_s = 0.0 if request.num_left == 1 else None
        return request

    def refuse(self, refused: Request) -> None:
        """Refuse a request as soon as it is tried, and remove it, as the engine does."""
        admit = self.admitter.admit
        self.admitter.outcomes[refused] = Admission.ENDED

        def admit_or_remove(request: Request, *args: object, **options: object) -> Admission:
            if request is refused:
                queue = self.queues[request.tenant]
                queue.remove(request)
                self.queues.close_if_empty(queue)
            return admit(request, *args, **options)  # type: ignore[arg-type]

        self.admitter.admit = admit_or_remove  # type: ignore[method-assign]

    def plan(self) -> list[Slice]:
        """Plan a step, and remember its blocked request for the next one."""
        plan = StepPlan(
            self.queues,
            self.running,
            self.blocked,
            cast("Admitter", self.admitter),
            self._max_tokens,
            self._max_running_requests,
            lambda: self.admitter.worked_s,
        )
        slices = plan.make_slices()
        self.blocked = plan.blocked
        return slices


def test_decoding_requests_come_first_and_prompts_get_the_other_tokens() -> None:
    bench = PlanBench(max_tokens=16)
    decoding, waiting = bench.add_running(9, 8), bench.add_waiting(20)
    assert bench.plan() == [Slice(decoding, 8, 9), Slice(waiting, 0, 15)]
    assert list(bench.running) == [decoding, waiting]
    assert bench.queues[""].served == 16


def test_a_step_has_no_more_tokens_than_its_budget() -> None:
    bench = PlanBench(max_tokens=3)
    decoding = [bench.add_running(9, 8) for _ in range(5)]
    assert [part.request for part in bench.plan()] == decoding[:3]
    assert list(bench.running) == [*decoding[3:], *decoding[:3]], (
        "the requests that got no token are the first of the next step"
    )


def test_tokens_that_prompts_do_not_need_go_to_decoding_requests() -> None:
    bench = PlanBench(max_tokens=8)
    decoding, short = [bench.add_running(9, 8) for _ in range(6)], bench.add_waiting(2)
    assert {part.request for part in bench.plan()} == {*decoding, short}


class TestNoPlaceForACompressedGeneration:
    """Compressed generations cannot be preempted, so two of four places are reserved for other requests."""

    def bench(self) -> PlanBench:
        bench = PlanBench(max_tokens=64, max_running_requests=4)
        for _ in range(2):
            bench.add_running(9, 8, "other", COMPRESSION)
        return bench

    def test_other_requests_of_its_tenant_overtake_a_compressed_generation(self) -> None:
        bench = self.bench()
        compressed, plain = bench.add_waiting(20, "acme", COMPRESSION), bench.add_waiting(5, "acme")
        assert [part.request for part in bench.plan()][2:] == [plain]
        assert list(bench.queues["acme"].waiting) == [compressed]
        assert bench.admitter.tried == [plain]

    def test_requests_behind_many_compressed_generations_overtake_them_the_longest_prefix_first(self) -> None:
        bench = self.bench()
        for _ in range(20):
            bench.add_waiting(20, "acme", COMPRESSION)
        plain = [bench.add_waiting(100, "acme") for _ in range(3)]
        bench.admitter.cached_tokens[plain[1]] = 8
        bench.plan()
        assert bench.admitter.tried == [plain[1]]

    def test_a_compressed_generation_gets_the_next_free_place(self) -> None:
        bench = self.bench()
        compressed, plain = [bench.add_waiting(2, "acme", COMPRESSION) for _ in range(2)], bench.add_waiting(5, "acme")
        ended = next(iter(bench.running))
        bench.queues["other"].running.remove(ended)
        del bench.running[ended]
        assert [part.request for part in bench.plan()][1:] == [compressed[0], plain]


def test_after_2_ms_of_work_a_turn_admits_one_request_and_no_more() -> None:
    bench = PlanBench(max_tokens=256, max_running_requests=16)
    crowd, other = [bench.add_waiting(1, "crowd") for _ in range(5)], bench.add_waiting(1, "other")
    bench.admitter.admit_s = 0.0015
    assert [part.request for part in bench.plan()] == [*crowd[:2], other]


def test_tenants_are_charged_by_weight() -> None:
    bench = PlanBench(max_tokens=256, a=3.0)
    for tenant in "ab":
        bench.add_waiting(1000, tenant)
    assert {part.request.tenant: part.end for part in bench.plan()} == {"a": 192, "b": 64}, "three to one"
    assert bench.queues["a"].served == bench.queues["b"].served == 64


def test_the_longest_cached_prefix_is_admitted_first() -> None:
    bench = PlanBench(max_tokens=10)
    first, hit = bench.add_waiting(10), bench.add_waiting(10)
    bench.admitter.cached_tokens[hit] = 8
    assert bench.plan() == [Slice(hit, 8, 10), Slice(first, 0, 8)]
    assert bench.queues[""].num_passed_over == 0, "the first one was admitted as well"


def test_no_request_is_looked_up_while_all_fit() -> None:
    bench = PlanBench(max_tokens=100)
    requests = [bench.add_waiting(10) for _ in range(4)]
    assert [part.request for part in bench.plan()] == requests
    assert bench.admitter.num_lookups == 0


def test_a_request_that_waits_for_blocks_blocks_others_in_later_steps_too() -> None:
    bench = PlanBench(max_tokens=16)
    blocked, other = bench.add_waiting(20), bench.add_waiting(20)
    bench.admitter.outcomes[blocked] = Admission.NO_ROOM
    for _ in range(2):
        assert bench.plan() == []
        assert bench.blocked is blocked
    assert bench.admitter.tried == [blocked, blocked]
    bench.admitter.outcomes.clear()
    assert bench.plan() == [Slice(blocked, 0, 16)]
    assert bench.blocked is None
    assert other in bench.queues[""].waiting


def test_a_short_prefill_passes_a_request_that_waits_for_blocks() -> None:
    bench = PlanBench(max_tokens=16)
    blocked, short = bench.add_waiting(20), bench.add_waiting(5)
    bench.admitter.outcomes[blocked] = Admission.NO_ROOM
    assert bench.plan() == [Slice(short, 0, 5)]
    assert bench.blocked is blocked


@pytest.mark.parametrize("outcome", [Admission.FOLLOWS, Admission.ENDED])
def test_a_request_that_follows_or_is_refused_delays_no_other(outcome: Admission) -> None:
    bench = PlanBench(max_tokens=100)
    first, other = bench.add_waiting(10), bench.add_waiting(10)
    bench.admitter.outcomes[first] = outcome
    if outcome is Admission.ENDED:
        bench.refuse(first)
    assert [part.request for part in bench.plan()] == [other]
    assert (first in bench.queues[""].following) == (outcome is Admission.FOLLOWS)


def test_a_tenant_over_its_quota_delays_only_its_own_requests() -> None:
    bench = PlanBench(max_tokens=200)
    over_quota, behind, other = bench.add_waiting(150, "a"), bench.add_waiting(150, "a"), bench.add_waiting(10, "b")
    bench.admitter.outcomes[over_quota] = Admission.OVER_QUOTA
    assert [part.request for part in bench.plan()] == [other]
    assert bench.blocked is None
    assert behind in bench.queues["a"].waiting


def test_a_place_is_left_for_a_tenant_without_running_requests() -> None:
    bench = PlanBench(max_tokens=100, max_running_requests=2)
    bench.add_running(9, 8, "a")
    mine, other = bench.add_waiting(10, "a"), bench.add_waiting(10, "b")
    assert other in {part.request for part in bench.plan()}
    assert mine in bench.queues["a"].waiting


def test_the_lookup_of_a_deep_path_is_charged_and_uses_tokens_of_the_step() -> None:
    bench = PlanBench(max_tokens=300)
    deep = [bench.add_waiting(4) for _ in range(4)]
    for request in deep:
        bench.admitter.num_nodes[request] = 32 * 100
    assert bench.plan() == [Slice(request, 0, 4) for request in deep[:3]]
    assert bench.queues[""].served == 3 * (4 + 100), "32 nodes of a path cost as much as a token"


def test_a_request_whose_path_costs_more_than_a_step_is_served_and_charged_in_full() -> None:
    bench = PlanBench(max_tokens=16)
    deep, other = bench.add_waiting(4, "deep"), bench.add_waiting(4, "other")
    bench.admitter.num_nodes[deep] = 32 * 1000
    assert Slice(deep, 0, 4) in bench.plan()
    assert bench.queues["deep"].served == 4 + 1000
    bench.queues["deep"].running.clear()
    bench.running.clear()
    assert Slice(other, 0, 4) in bench.plan()


def test_deep_paths_reduce_the_number_of_lookups() -> None:
    bench = PlanBench(max_tokens=8)
    for _ in range(16):
        request = bench.add_waiting(20)
        bench.admitter.num_nodes[request] = 64 * 31
    bench.plan()
    assert bench.admitter.num_lookups == 2


def test_after_half_a_millisecond_of_lookups_no_more_requests_are_looked_up() -> None:
    bench = PlanBench(max_tokens=8)
    for _ in range(16):
        bench.add_waiting(20)
    bench.admitter.lookup_s = 0.0002
    bench.plan()
    assert bench.admitter.num_lookups == 3, "the third lookup began after 0.4 ms, and ended after 0.6 ms"


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_refusal_is_charged_whether_or_not_its_tenant_has_more_requests(num_requests: int) -> None:
    bench = PlanBench(max_tokens=300)
    refused, *_ = [bench.add_waiting(4, "refused") for _ in range(num_requests)]
    bench.add_waiting(1000, "stays")
    bench.admitter.num_nodes[refused] = 32 * 1000
    bench.refuse(refused)
    bench.plan()
    assert bench.queues.open("refused").served == 1 + 1000, "one token for the attempt, and the path"


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_refusal_of_a_request_that_would_overtake_others_is_charged(is_blocked: bool) -> None:
    bench = PlanBench(max_tokens=300)
    bench.add_running(2000, 100)
    if is_blocked:
        bench.blocked = bench.add_waiting(5000, "other")
        bench.admitter.outcomes[bench.blocked] = Admission.NO_ROOM
    refused = bench.add_waiting(4)
    bench.admitter.num_nodes[refused] = 32 * 10
    bench.refuse(refused)
    slices = bench.plan()
    assert bench.admitter.tried[:1] == [refused]
    assert sum(part.end - part.start for part in slices) == 300 - (1 + 10)
    assert bench.queues[""].served == 300
