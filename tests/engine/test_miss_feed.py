"""What the engine passes to the profiler of misses, and what the profiler finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.doctor.causes import MissCause
from radixkv.doctor.miss_profiler import AdmittedPrompt, Branches, MissProfiler
from radixkv.engine.miss_feed import MissFeed
from radixkv.namespace import PUBLIC_TENANT
from tests.core_bench import Bench
from tests.fake_runner import tokens
from tests.patience import wait_until


class Recorder(MissProfiler):
    """A profiler that only keeps what it receives. Its thread is not started.

    Attributes:
        prompts: the admitted prompts.
        segments: tenant, tokens and number of each segment.
        prefill_seconds: the duration of each step, as far as it was spent on prompts.
    """

    def __init__(self) -> None:
        super().__init__(1.0)
        self.prompts: list[AdmittedPrompt] = []
        self.segments: list[tuple[str, bytes, int]] = []
        self.prefill_seconds: list[float] = []

    def add_prompt(self, prompt: AdmittedPrompt) -> None:
        self.prompts.append(prompt)

    def add_segment(self, tenant: str, tokens: bytes, number: int) -> None:
        self.segments.append((tenant, tokens, number))

    def add_step(self, seconds: float) -> None:
        self.prefill_seconds.append(seconds)


class FeedBench:
    """An engine core that feeds a recorder."""

    def __init__(self, **options: object) -> None:
        self.recorder = Recorder()
        self.feed = MissFeed(self.recorder)
        self.bench = Bench(observers=[self.feed], listeners=[self.feed], **options)
        self.feed.cache = self.bench.cache

    def require_all_passed(self) -> None:
        """Check that every cached token was passed with the number of the node that has it now."""
        passed: dict[int, set[int]] = {}  # token ids by segment number
        for _, segment_tokens, number in self.recorder.segments:
            passed.setdefault(number, set()).update(np.frombuffer(segment_tokens, "<u4").tolist())
        for node in self.bench.cache.nodes():
            assert set(np.frombuffer(node.tokens, "<u4").tolist()) <= passed[node.segment_number]


@pytest.fixture
def fed() -> FeedBench:
    return FeedBench()


def test_a_prompt_is_passed_as_it_was_admitted(fed: FeedBench) -> None:
    fed.bench.prefill(range(10), tenant="a", session_id="s")
    fed.bench.prefill(range(10), tenant="a")
    fed.bench.prefill([0, 1, 2, 3, 77], tenant="b")
    first, second, third = fed.recorder.prompts
    assert (first.namespace.tenant, first.session_id, first.tokens) == ("a", "s", tokens(range(10)))
    assert [each.cached_tokens for each in fed.recorder.prompts] == [0, 9, 0]
    reasons = [each.miss_reason for each in fed.recorder.prompts]
    assert reasons == [MissReason.COLD, MissReason.NONE, MissReason.COLD]
    assert third.namespace.tenant == "b"
    assert second.session_id == ""


@pytest.mark.parametrize("max_step_tokens", [4, 7, 512])
def test_all_tokens_are_passed_however_a_prompt_is_computed(max_step_tokens: int) -> None:
    fed = FeedBench(max_step_tokens=max_step_tokens)
    fed.bench.prefill(range(30), tenant="a")
    fed.bench.generate(range(40, 60), 12, tenant="a")
    fed.bench.run()
    fed.bench.prefill([*range(12), *range(100, 120)], tenant="a")
    fed.bench.prefill([*range(30), *range(200, 215)], tenant="a")
    fed.require_all_passed()
    assert {tenant for tenant, _, _ in fed.recorder.segments} == {"a"}


def test_prompts_that_run_at_the_same_time_are_passed(fed: FeedBench) -> None:
    futures = [fed.bench.submit([*range(16), *range(100 * each, 100 * each + 20)], tenant="a") for each in range(1, 4)]
    fed.bench.run()
    assert all(future.done() for future in futures)
    fed.require_all_passed()
    assert len(fed.recorder.prompts) == 3


def test_a_preempted_request_is_counted_once() -> None:
    fed = FeedBench(num_blocks=12)
    futures = [fed.bench.generate(range(100 * each, 100 * each + 10), 20) for each in range(2)]
    fed.bench.run()
    assert all(future.done() for future in futures)
    assert fed.bench.core.stats.stats().load.requests.pauses > 0
    assert len(fed.recorder.prompts) == 2


def test_only_the_time_of_prefills_is_reported() -> None:
    fed = FeedBench()
    run = fed.bench.runner.run

    def run_slowly(chunks):  # type: ignore[no-untyped-def]
        fed.bench.clock.now_s += 1.0
        return run(chunks)

    fed.bench.runner.run = run_slowly  # type: ignore[method-assign]
    fed.bench.generate(range(10), 5)
    fed.bench.run()
    assert fed.recorder.prefill_seconds == [1.0]
    generating = fed.bench.generate(range(50, 60), 5)
    while not generating.streamed:  # type: ignore[attr-defined]
        fed.bench.core.step()
    fed.bench.prefill(range(100, 103))
    # In the last step, three of four tokens are those of a prompt.
    assert fed.recorder.prefill_seconds == [1.0, 1.0, 0.75]


def test_the_engines_own_prompts_are_not_passed(fed: FeedBench) -> None:
    fed.bench.prefill(range(10), tenant=PUBLIC_TENANT)
    assert (fed.recorder.prompts, fed.recorder.segments) == ([], [])


def test_a_segment_that_was_evicted_before_the_request_ended_is_not_passed() -> None:
    fed = FeedBench(num_blocks=8)
    fed.bench.prefill(range(20))
    fed.recorder.segments.clear()
    leaf = next(iter(fed.bench.cache.nodes()))
    fed.feed.inserted(leaf, 0.0)
    fed.bench.cache.evict(8)
    fed.feed.pass_segments()
    assert fed.recorder.segments == []


def test_an_evicted_prompt_is_passed_with_whether_its_own_tenant_evicted_it() -> None:
    fed = FeedBench(num_blocks=320, max_step_tokens=1000)
    for tenant, start in (("a", 1000), ("b", 2000), ("b", 3000), ("b", 2000), ("a", 1000)):
        fed.bench.prefill(range(start, start + 800), tenant=tenant)
    evicted = [each for each in fed.recorder.prompts if each.miss_reason is MissReason.EVICTED]
    assert [(each.namespace.tenant, each.is_evicted_by_self) for each in evicted] == [("b", True), ("a", False)]


@pytest.fixture
def profiler() -> Iterator[MissProfiler]:
    profiler = MissProfiler(1.0)
    yield profiler
    profiler.close()


def start(profiler: MissProfiler, bench: Bench) -> None:
    """Start a profiler that looks up branches in the core of a bench."""

    def find_branches(numbers: Sequence[int], tenant: str, session_id: str) -> Future[Branches]:
        future: Future[Branches] = Future()
        future.set_result(bench.core.branches_at(numbers, tenant, session_id))
        return future

    profiler.start(find_branches)


def test_the_profiler_finds_how_prompts_differ_from_those_that_the_engine_has_cached(profiler: MissProfiler) -> None:
    feed = MissFeed(profiler)
    bench = Bench(num_blocks=400, max_step_tokens=64, observers=[feed], listeners=[feed])
    feed.cache = bench.cache
    start(profiler, bench)
    body = [*range(1000, 1500)]
    for head, tenant in ((1, "a"), (2, "a"), (3, "b"), (4, "a")):
        profiler.add_step(1.0)
        future = bench.submit([head, head + 50, *body, head + 90], tenant=tenant)
        bench.core.step()  # admits the request
        wait_until(lambda: not profiler.is_busy)
        bench.run()
        assert future.done()
        wait_until(lambda: not profiler.is_busy)
    report = profiler.report(None, 10)
    assert [(each.tenant, each.group.key.cause, each.group.num_prompts) for each in report.groups] == [
        ("a", MissCause.REPLACED, 2)
    ]
    assert report.groups[0].group.lost_tokens == 2 * len(body)
    assert report.counts.first_prompts == 2


def test_a_shared_passage_is_found_after_the_end_of_its_first_prompt_was_evicted(profiler: MissProfiler) -> None:
    """The passage is the upper half of a node whose lower half, with the number of both, is evicted."""
    feed = MissFeed(profiler)
    bench = Bench(num_blocks=400, observers=[feed], listeners=[feed])
    feed.cache = bench.cache
    start(profiler, bench)
    body = [*range(1000, 1600)]
    bench.prefill([*body, *range(100)])
    bench.prefill([*body, *range(200, 300)])
    wait_until(lambda: not profiler.is_busy)
    assert bench.cache.evict(20) == 20  # the tail of the first prompt, which was used longest ago
    profiler.add_step(10.0)
    bench.submit([7, 8, *body, 9])
    bench.core.step()
    wait_until(lambda: not profiler.is_busy)
    groups = profiler.report(None, 10).groups
    assert [(each.group.key.cause, each.group.lost_tokens) for each in groups] == [(MissCause.MESSAGE_INSERTED, 600)]
