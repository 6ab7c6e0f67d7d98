"""The profiler of misses: which misses it examines, what it finds, and what it forgets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from radixkv.api.explanation import CachedBranch, NamedBranch
from radixkv.api.miss_reason import MissReason
from radixkv.doctor import miss_profile, miss_profiler
from radixkv.doctor.causes import MissCause
from radixkv.doctor.miss_profiler import MIN_MISSED_TOKENS, PERIOD_S, AdmittedPrompt, Branches, MissProfiler
from radixkv.errors import Draining
from radixkv.invocation import MAX_INVOKED_VOCAB
from radixkv.namespace import Namespace
from tests.fakes import FakeClock
from tests.patience import wait_until

from .logs import ACME, characters


def pack(text: str) -> bytes:
    """Return the tokens of a text, one per character, as the cache keeps them."""
    return np.array([ord(each) for each in text], "<u4").tobytes()


BODY = "".join(f"line {number} of a manual that all prompts have; " for number in range(60))
MARK = np.uint32(5 * MAX_INVOKED_VOCAB)  # of an invoked adapter
PROMPT, CACHED = f"build 4f2a9c1 {BODY}", f"build b07e55d {BODY}"


class Bench:
    """A profiler with a clock of its own, and a fake engine.

    Attributes:
        clock: the clock of the profiler.
        work_s: CPU seconds that the profiler's thread believes to have used.
        cached: the branches of the fake engine, by segment number.
        lookups: the segment numbers, the tenant and the session of each look-up in the engine.
        error: the exception with which look-ups fail; None if they succeed.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.clock = FakeClock()
        self.work_s = 0.0
        self.cached: dict[int, NamedBranch] = {}
        self.lookups: list[tuple[list[int], str, str]] = []
        self.error: Exception | None = None
        self.profiler = MissProfiler(share, self.clock, lambda: self.work_s)
        self.profiler.load_decode = lambda: characters
        self.profiler.start(self.find_branches)

    def find_branches(self, segment_numbers: Sequence[int], tenant: str, session_id: str) -> Future[Branches]:
        self.lookups.append((list(segment_numbers), tenant, session_id))
        future: Future[Branches] = Future()
        if self.error is not None:
            future.set_exception(self.error)
            return future
        branches = [self.cached[segment_number] for segment_number in segment_numbers if segment_number in self.cached]
        own_branches = [each for each in branches if each.namespace.tenant == tenant]
        future.set_result(Branches(own_branches, token_s=0.01, cpu_s=0.0))
        return future

    def cache(self, segment_number: int, text: str, namespace: Namespace = ACME) -> None:
        """Add a cached prompt to the engine, and pass it to the profiler."""
        tokens = pack(text)
        self.cached[segment_number] = NamedBranch(namespace, "", CachedBranch((tokens,), 0, 1.0))
        self.profiler.add_segment(namespace.tenant, tokens, segment_number)
        self.wait()

    def admit(
        self,
        text: str,
        namespace: Namespace = ACME,
        cached_tokens: int = 0,
        reason: MissReason = MissReason.COLD,
        session_id: str = "",
    ) -> None:
        self.profiler.add_prompt(AdmittedPrompt(namespace, session_id, pack(text), cached_tokens, reason))
        self.wait()

    def wait(self) -> None:
        wait_until(lambda: not self.profiler.is_busy)

    def causes(self, tenant: str | None = None) -> list[tuple[MissCause, int]]:
        groups = self.profiler.report(tenant, 100).groups
        return [(each.group.key.cause, each.group.num_prompts) for each in groups]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1]

    yield make
    for each in benches:
        each.profiler.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def test_a_miss_is_compared_with_what_is_cached(bench: Bench) -> None:
    bench.cache(3, CACHED)
    bench.admit(PROMPT, cached_tokens=6, reason=MissReason.DIVERGED)
    report = bench.profiler.report(None, 10)
    ((tenant, group),) = report.groups
    assert (tenant, group.key.cause, group.key.pattern) == ("acme", MissCause.RANDOM_ID, "7 hexadecimal digits")
    assert group.lost_tokens == pytest.approx(len(BODY), abs=2)
    assert group.lost_s == pytest.approx(group.lost_tokens * 0.01)
    assert group.sample is not None
    assert group.sample.prompt.text == "4f2a9c1"
    counts = report.counts
    assert (counts.prompts, counts.prompt_tokens, counts.cached_tokens) == (1, len(PROMPT), 6)
    assert (counts.misses, counts.examined_misses, counts.first_prompts) == (1, 1, 0)
    assert counts.missed_tokens == counts.examined_tokens == len(PROMPT) - 6


def test_a_prompt_that_resembles_no_other_is_a_first_prompt(bench: Bench) -> None:
    bench.cache(3, CACHED)
    bench.admit("".join(chr(40_000 + number) for number in range(1000)))
    assert bench.causes() == []
    assert bench.profiler.report(None, 10).counts.first_prompts == 1


@pytest.mark.parametrize("num_missed", [0, 1, MIN_MISSED_TOKENS - 1])
def test_a_hit_is_counted_and_not_examined(bench: Bench, num_missed: int) -> None:
    bench.cache(3, CACHED)
    bench.admit(PROMPT, cached_tokens=len(PROMPT) - num_missed)
    counts = bench.profiler.report(None, 10).counts
    assert (counts.prompts, counts.misses, bench.lookups) == (1, 0, [])


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (MissReason.EVICTED, MissCause.EVICTED),
        (MissReason.EXPIRED, MissCause.EXPIRED),
        (MissReason.NOT_LOADED, MissCause.NOT_LOADED),
        (MissReason.NO_STATE, MissCause.NO_STATE),
        (MissReason.NO_WINDOW, MissCause.NO_WINDOW),
        (MissReason.READ_DISABLED, MissCause.READ_DISABLED),
        (MissReason.ADAPTER_CHANGED, MissCause.ADAPTER_CHANGED),
    ],
)
def test_a_cause_that_the_cache_knows_needs_no_comparison(bench: Bench, reason: MissReason, cause: MissCause) -> None:
    bench.admit(PROMPT, cached_tokens=100, reason=reason)
    ((_, group),) = bench.profiler.report(None, 10).groups
    assert (group.key.cause, group.lost_tokens, group.is_bound) == (cause, len(PROMPT) - 101, True)
    assert bench.lookups == []
    assert bench.profiler.report(None, 10).counts.examined_misses == 1


@pytest.mark.parametrize(("by_self", "cause"), [(True, MissCause.EVICTED_BY_OWN), (False, MissCause.EVICTED_BY_OTHERS)])
def test_evictions_for_the_tenant_itself_and_for_others_are_distinguished(
    bench: Bench, by_self: bool, cause: MissCause
) -> None:
    prompt = AdmittedPrompt(ACME, "", pack(PROMPT), 0, MissReason.EVICTED, by_self)
    bench.profiler.add_prompt(prompt)
    assert bench.causes() == [(cause, 1)]


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (ACME._replace(salt="s"), MissCause.SALT_CHANGED),
        (ACME._replace(adapter="lora"), MissCause.ADAPTER_CHANGED),
    ],
)
def test_another_salt_or_adapter_of_the_tenant_is_a_cause(bench: Bench, other: Namespace, cause: MissCause) -> None:
    bench.cache(3, PROMPT, other)
    bench.admit(PROMPT)
    assert bench.causes() == [(cause, 1)]


def test_nothing_of_another_tenant_is_looked_up_or_reported(bench: Bench) -> None:
    bench.cache(3, CACHED, Namespace("model", "globex"))
    bench.admit(PROMPT)
    assert bench.lookups == [([], "acme", "")]
    assert bench.causes() == []
    bench.cache(4, PROMPT)
    bench.admit(CACHED)
    assert bench.causes("globex") == []
    assert bench.causes("acme") == [(MissCause.RANDOM_ID, 1)]


def test_tokens_below_a_public_prefix_do_not_count_as_another_namespace(bench: Bench) -> None:
    bench.cache(3, CACHED, ACME._replace(public_prefix="1:64"))
    bench.admit(PROMPT)
    assert bench.causes() == [(MissCause.RANDOM_ID, 1)]


def test_marks_of_invoked_adapters_are_not_compared(bench: Bench) -> None:
    tokens = np.array([ord(each) for each in CACHED], "<u4")
    tokens[len(CACHED) // 2 :] |= MARK
    bench.cached[3] = NamedBranch(ACME, "", CachedBranch((tokens.tobytes(),), 0, 1.0))
    bench.profiler.add_segment("acme", tokens.tobytes(), 3)
    bench.wait()
    bench.admit(PROMPT)
    assert bench.causes() == [(MissCause.RANDOM_ID, 1)]


def test_misses_are_only_counted_while_the_profilers_time_is_used_up(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(share=0.02)
    bench.cache(3, CACHED)
    bench.admit(PROMPT)
    find = bench.find_branches

    def find_slowly(*arguments: Any) -> Future[Branches]:
        bench.work_s += 3.0
        return find(*arguments)

    bench.profiler._find_branches = find_slowly
    bench.admit(PROMPT)  # takes 3 s, more than the profiler may use
    bench.admit(PROMPT)
    counts = bench.profiler.report(None, 10).counts
    assert (counts.misses, counts.examined_misses) == (3, 2)
    bench.profiler.add_step(40.0)  # the profiler may use 0.8 s of this, less than its debt of 1 s, the maximum
    bench.admit(PROMPT)
    assert bench.profiler.report(None, 10).counts.examined_misses == 2
    for _ in range(2):
        bench.profiler.add_step(10.0)
    bench.admit(PROMPT)
    assert bench.profiler.report(None, 10).counts.examined_misses == 3


def test_time_is_not_saved_up_without_end(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(share=0.02)
    bench.cache(3, CACHED)
    bench.profiler.add_step(1e9)
    find = bench.find_branches

    def find_slowly(*arguments: Any) -> Future[Branches]:
        bench.work_s += 0.6
        return find(*arguments)

    bench.profiler._find_branches = find_slowly
    for _ in range(10):
        bench.admit(PROMPT)
    assert bench.profiler.report(None, 10).counts.examined_misses == 2


def test_the_time_of_the_engines_thread_counts(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(share=0.02)
    branches = Branches([], token_s=None, cpu_s=5.0)

    def find(*_: object) -> Future[Branches]:
        future: Future[Branches] = Future()
        future.set_result(branches)
        return future

    bench.profiler._find_branches = find
    for _ in range(5):
        bench.admit(PROMPT)
    assert bench.profiler.report(None, 10).counts.examined_misses == 1


def test_a_full_queue_accepts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_profiler, "_MAX_WAITING_BYTES", 3 * len(pack(PROMPT)))
    profiler = MissProfiler(1.0)  # whose thread is not started
    for _ in range(10):
        profiler.add_prompt(AdmittedPrompt(ACME, "", pack(PROMPT), 0, MissReason.COLD))
    profiler.add_segment("acme", pack(PROMPT), 1)
    assert profiler._queue.qsize() == 3
    assert profiler.report(None, 10).counts.misses == 10
    profiler.close()


def test_a_prompt_longer_than_the_queue_is_examined_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_profiler, "_MAX_WAITING_BYTES", 100)
    bench.cache(3, CACHED)
    bench.admit(PROMPT)
    assert bench.causes() == [(MissCause.RANDOM_ID, 1)]


def test_a_forgotten_tenant_has_no_misses_any_more(bench: Bench) -> None:
    globex = Namespace("model", "globex")
    for segment_number, namespace in enumerate((ACME, globex)):
        bench.cache(segment_number, CACHED, namespace)
        bench.admit(PROMPT, namespace)
    bench.profiler.forget("acme")
    assert bench.causes("acme") == []
    assert bench.profiler.report("acme", 10).counts.prompts == 0
    assert bench.causes("globex") == [(MissCause.RANDOM_ID, 1)]
    bench.profiler.forget(None)
    assert bench.profiler.report(None, 10).counts.prompts == 0


def test_a_miss_that_waits_when_its_tenant_is_forgotten_leaves_nothing(bench: Bench) -> None:
    bench.cache(3, CACHED)
    find = bench.find_branches

    def find_and_forget(*arguments: Any) -> Future[Branches]:
        bench.profiler.forget("acme")
        return find(*arguments)

    bench.profiler._find_branches = find_and_forget
    bench.admit(PROMPT)
    assert bench.causes() == []
    assert bench.profiler.report(None, 10).counts.examined_misses == 0


def test_a_prompt_with_a_salt_leaves_no_tokens(bench: Bench) -> None:
    salted = ACME._replace(salt="user-1")
    bench.cache(3, CACHED, salted)
    bench.admit(PROMPT, salted)
    ((_, group),) = bench.profiler.report(None, 10).groups
    assert (group.key.cause, group.sample) == (MissCause.RANDOM_ID, None)


def test_equal_tokens_that_an_invoked_adapter_computed_are_a_change_of_the_adapter(bench: Bench) -> None:
    tokens = np.array([ord(each) for each in PROMPT], "<u4")
    tokens[20:] |= MARK
    bench.cached[3] = NamedBranch(ACME, "", CachedBranch((tokens.tobytes(),), 0, 1.0))
    bench.profiler.add_segment("acme", tokens.tobytes(), 3)
    bench.wait()
    bench.admit(PROMPT, cached_tokens=20)
    ((_, group),) = bench.profiler.report(None, 10).groups
    assert (group.key.cause, group.lost_tokens) == (MissCause.ADAPTER_CHANGED, len(PROMPT) - 21)


def test_a_prompt_that_was_published_since_its_admission_is_not_compared_with_itself(bench: Bench) -> None:
    bench.cache(3, PROMPT + "its answer")
    bench.admit(PROMPT)
    assert bench.causes() == []


def test_only_the_beginning_of_a_long_prompt_is_compared(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_profiler, "MAX_COMPARED_TOKENS", 1000)
    bench.cache(3, CACHED)
    bench.admit(PROMPT, cached_tokens=900, reason=MissReason.DIVERGED)
    counts = bench.profiler.report(None, 10).counts
    assert (counts.misses, counts.examined_misses, counts.first_prompts) == (1, 0, 0)
    bench.admit(PROMPT, cached_tokens=6, reason=MissReason.DIVERGED)
    report = bench.profiler.report(None, 10)
    assert (report.counts.examined_misses, report.counts.examined_tokens) == (1, len(PROMPT) - 6)
    assert 900 < report.groups[0].group.lost_tokens < 1000


def test_misses_of_tenants_without_groups_take_no_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_profile, "MAX_TENANTS", 1)
    bench.cache(3, CACHED)
    bench.admit(PROMPT)
    bench.admit(PROMPT, Namespace("model", "globex"))
    assert [tenant for _, tenant, _ in bench.lookups] == ["acme"]
    assert bench.profiler.report(None, 10).counts.misses == 2


def test_a_report_covers_the_present_hour_and_the_one_before(bench: Bench) -> None:
    bench.cache(3, CACHED)
    for number in range(4):
        bench.admit(PROMPT)
        report = bench.profiler.report(None, 10)
        assert bench.causes() == [(MissCause.RANDOM_ID, min(number + 1, 2))]
        assert report.covered_s == min(number, 1) * PERIOD_S
        bench.clock.now_s += PERIOD_S
    bench.clock.now_s += 0.75 * PERIOD_S
    assert bench.causes() == [(MissCause.RANDOM_ID, 1)]
    assert bench.profiler.report(None, 10).covered_s == 1.75 * PERIOD_S
    bench.clock.now_s += 0.5 * PERIOD_S
    assert bench.causes() == []
    assert bench.profiler.report(None, 10).covered_s == 1.25 * PERIOD_S


@pytest.mark.parametrize("error", [Draining("engine: stopped"), TimeoutError()])
def test_an_engine_that_does_not_answer_does_not_end_the_thread(bench: Bench, error: Exception) -> None:
    bench.cache(3, CACHED)
    bench.error = error
    bench.admit(PROMPT)
    bench.error = None
    bench.admit(PROMPT)
    assert bench.causes() == [(MissCause.RANDOM_ID, 1)]


def test_a_bug_is_logged_without_tokens_and_does_not_end_the_thread(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.cache(3, CACHED)
    bench.error = RuntimeError(f"cannot decode {PROMPT}")
    with caplog.at_level(logging.DEBUG):
        bench.admit(PROMPT)
    assert "a miss could not be examined: RuntimeError at " in caplog.text
    assert "4f2a9c1" not in caplog.text
    bench.error = None
    bench.admit(PROMPT)
    assert bench.causes() == [(MissCause.RANDOM_ID, 1)]


def test_a_tokenizer_that_cannot_be_read_does_not_end_the_thread(bench: Bench) -> None:
    def fail() -> Any:
        raise OSError("the file is not there any more")

    bench.profiler.load_decode = fail
    bench.cache(3, CACHED)
    for _ in range(2):
        bench.admit(PROMPT)
    assert bench.causes() == [(MissCause.REPLACED, 1)]


def test_without_a_tokenizer_tokens_are_compared(bench: Bench) -> None:
    def refuse() -> Any:
        raise ValueError("no tokenizer")

    bench.profiler.load_decode = refuse
    bench.cache(3, CACHED)
    bench.admit(PROMPT)
    assert bench.causes() == [(MissCause.REPLACED, 1)]


def test_closing_cancels_what_the_thread_waits_for_and_examines_no_more(bench: Bench) -> None:
    bench.cache(3, CACHED)
    pending: list[Future[Branches]] = []

    def never_find(*_: object) -> Future[Branches]:
        pending.append(Future())
        return pending[-1]

    bench.profiler._find_branches = never_find
    for _ in range(5):
        bench.profiler.add_prompt(AdmittedPrompt(ACME, "", pack(PROMPT), 0, MissReason.COLD))
    wait_until(lambda: len(pending) == 1)
    bench.profiler.close()
    assert not bench.profiler._thread.is_alive()
    assert [each.cancelled() for each in pending] == [True]
