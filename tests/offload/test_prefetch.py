"""Loading prompts before a request needs them, from a store that several servers share."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.hints import HintAction, HintOutcome, HintStatus
from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.namespace import PromptKey
from tests.fake_runner import tokens
from tests.offload.test_offload import NAMESPACE
from tests.offload.tiered_bench import TieredBench

PROMPT, OTHER = range(13), range(50, 63)


@pytest.fixture
def bench() -> TieredBench:
    """Return a bench that has `PROMPT` in a shared store, but not on the device."""
    bench = TieredBench(num_blocks=8, redis=100)
    bench.prefill(PROMPT)
    bench.evict(4)
    return bench


def hint(bench: TieredBench, action_type: str, prompt: range | None = None, **payload: Any) -> HintOutcome:
    """Apply one hint about a prompt, and return its outcome."""
    key = None if prompt is None else PromptKey(NAMESPACE, tokens(prompt))
    (outcome,) = bench.core.hints.apply([HintAction("1", action_type, "1.0", payload)], "", key)
    return outcome


def cached_tokens(bench: TieredBench, prompt: range) -> int:
    return bench.cache.match(NAMESPACE, tokens(prompt)).cached_tokens


def test_a_stored_prompt_is_loaded(bench: TieredBench) -> None:
    assert hint(bench, "kv.prefetch", PROMPT).status is HintStatus.ACCEPTED
    bench.run()
    assert cached_tokens(bench, PROMPT) == 12
    stats = bench.core.agent_stats()
    assert (stats.prefetched_tokens, stats.dropped_prefetches) == (12, 0)


def test_a_prompt_that_no_store_has_is_dropped(bench: TieredBench) -> None:
    assert hint(bench, "kv.prefetch", OTHER).status is HintStatus.ACCEPTED  # the store has not answered yet
    bench.run()
    assert cached_tokens(bench, OTHER) == 0
    stats = bench.core.agent_stats()
    assert (stats.prefetched_tokens, stats.dropped_prefetches) == (0, 1)
    assert bench.prefill(OTHER).usage.computed_tokens == 13


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_prompt_of_a_session_that_has_ended_is_not_loaded(bench: TieredBench, *, has_ended: bool) -> None:
    bench.cache.lease(NAMESPACE, tokens(OTHER), session_id="s").close()
    with bench.cache.lease(NAMESPACE, tokens(OTHER), session_id="s") as lease:
        lease.commit(13)
    assert bench.core._prefetcher is not None
    assert bench.core._prefetcher.begin(NAMESPACE, tokens(PROMPT), "s") > 0
    if has_ended:
        bench.cache.end_session("", "s")
    bench.run()
    assert cached_tokens(bench, PROMPT) == (0 if has_ended else 12)


@pytest.mark.parametrize("has_hint", [False, True])
def test_only_a_hint_counts_as_a_use_of_what_is_still_cached(*, has_hint: bool) -> None:
    bench = TieredBench(num_blocks=8, session_prompt_bytes=0 if has_hint else 10_000, redis=100)
    bench.prefill(PROMPT, session_id="s", awaits=Awaits.TOOL)
    bench.evict(2)
    (node,) = bench.cache.nodes()
    before = node.num_uses
    bench.clock.now_s += 100
    if has_hint:
        hint(bench, "kv.prefetch", PROMPT)
    bench.run()
    assert cached_tokens(bench, PROMPT) == 12
    (node,) = bench.cache.nodes()
    assert node.num_uses == before + has_hint


def test_prompts_of_sessions_are_looked_up_one_at_a_time() -> None:
    bench = TieredBench(num_blocks=8, session_prompt_bytes=10_000, redis=100)
    for session_id, prompt in (("s", PROMPT), ("t", OTHER)):
        with bench.cache.lease(NAMESPACE, tokens(prompt), session_id=session_id) as lease:
            lease.commit(13)
            lease.awaits = Awaits.TOOL
        bench.cache.drop(NAMESPACE, tokens(prompt), evicts=False)
    bench.clock.now_s = 100
    prefetcher = bench.core._prefetcher
    assert prefetcher is not None
    assert prefetcher.seconds_until_due(100) == 0
    bench.core.step()
    assert prefetcher.seconds_until_due(100) is None  # until the store answers
    bench.core.step()
    assert len(bench.offload._lookups._num_open) == 1
    bench.run()
    due_s = prefetcher.seconds_until_due(bench.clock.now_s)
    assert due_s is not None, "both prompts were looked up, and will be examined again"
    assert due_s > 0


def test_directives_before_one_that_is_wrong_have_their_effect(bench: TieredBench) -> None:
    bench.prefill(OTHER)
    outcome = hint(bench, "kv.retain", OTHER, directives=[{"priority": 90, "end": 4}, {"priority": 900}])
    assert (outcome.status, outcome.tokens) == (HintStatus.CLIPPED, 4)
    assert "expected 0 to 100, got 900" in outcome.reason
    assert {node.priority for node in bench.cache.nodes()} == {90, DEFAULT_PRIORITY}
    assert hint(bench, "kv.retain", OTHER, directives=[{"priority": 900}]).status is HintStatus.REFUSED
    assert hint(bench, "kv.retain", OTHER, priority=10**400).status is HintStatus.REFUSED


def test_waiting_for_a_tool_does_not_count_as_a_use(bench: TieredBench) -> None:
    bench.prefill(OTHER)
    (node,) = bench.cache.nodes()
    before_s = node.last_used_s
    bench.clock.now_s += 100
    assert hint(bench, "kv.await", OTHER, awaits="tool").tokens == 13
    (node,) = bench.cache.nodes()
    assert (node.awaits, node.last_used_s) == (Awaits.TOOL, before_s)
    bench.cache.check()
