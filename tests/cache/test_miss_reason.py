from __future__ import annotations

from radixkv.api.miss_reason import MissReason
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import all_slices
from radixkv.namespace import Namespace, PromptKey
from radixkv.tokens import prefix_fingerprint
from tests.fakes import MODEL, FakeClock, publish, spell


def explain(cache: PrefixCache, text: str, namespace: Namespace = MODEL) -> MissReason:
    tokens = spell(text)
    return cache.explain(namespace, tokens, cache.match(namespace, tokens).cached_tokens)


def make_cache(num_blocks: int = 16) -> PrefixCache:
    return PrefixCache(num_blocks, 4, clock=FakeClock())


def test_a_first_prompt_is_cold() -> None:
    assert explain(make_cache(), "abcdef") is MissReason.COLD


def test_a_prompt_with_another_first_token_is_cold() -> None:
    cache = make_cache()
    publish(cache, "abcdef")
    assert explain(cache, "Xbcdef") is MissReason.COLD


def test_a_prompt_reused_but_for_its_last_token_missed_nothing() -> None:
    cache = make_cache()
    publish(cache, "abcdef")
    assert explain(cache, "abcdef") is MissReason.NONE
    assert explain(cache, "abcdeX") is MissReason.NONE
    assert explain(cache, "abcdefX") is MissReason.NONE
    assert explain(cache, "abcdXX") is MissReason.DIVERGED


def test_a_prompt_of_one_token_missed_nothing() -> None:
    assert explain(make_cache(), "a") is MissReason.NONE


def test_a_prompt_that_differs_after_its_prefix_diverged() -> None:
    cache = make_cache()
    publish(cache, "abcdefghij")
    assert explain(cache, "abcdefghXXXX") is MissReason.DIVERGED
    assert explain(cache, "abXXXX") is MissReason.DIVERGED


def test_an_evicted_prompt_was_evicted() -> None:
    cache = make_cache()
    publish(cache, "abcdefghijkl")
    cache.evict(3)
    assert explain(cache, "abcdefghijkl") is MissReason.EVICTED
    assert explain(cache, "abcdXXXX") is MissReason.EVICTED
    assert explain(cache, "XXXXefgh") is MissReason.COLD


def test_a_truncated_prompt_was_evicted_where_it_now_ends() -> None:
    cache = make_cache()
    publish(cache, "abcdefghijkl")
    cache.evict(1)
    assert explain(cache, "abcdefghijkl") is MissReason.EVICTED
    assert explain(cache, "abcdefghXXXX") is MissReason.DIVERGED


def test_an_evicted_branch_was_evicted_and_its_sibling_was_not() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh")
    publish(cache, "abcdEFGH")
    cache.evict(1)  # the older leaf
    assert explain(cache, "abcdefgh") is MissReason.EVICTED
    assert explain(cache, "abcdEFGHXX") is MissReason.DIVERGED
    assert explain(cache, "abcdXXXX") is MissReason.DIVERGED


def test_a_prompt_cached_again_is_not_called_evicted() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh")
    cache.evict(2)
    publish(cache, "abcdefgh")
    assert explain(cache, "abcdefghXX") is MissReason.DIVERGED
    assert explain(cache, "abcdefgh") is MissReason.NONE


def test_one_namespace_does_not_learn_what_another_lost() -> None:
    cache, other = make_cache(), Namespace("model", salt="other")
    publish(cache, "abcdefgh")
    cache.evict(2)
    assert explain(cache, "abcdefgh", other) is MissReason.COLD
    assert explain(cache, "abcdefgh") is MissReason.EVICTED


def test_a_prefix_whose_eviction_is_forgotten_is_cold() -> None:
    cache = PrefixCache(16, 4, clock=FakeClock(), max_evicted_prefixes=1)
    for text in ("abcd", "efgh"):
        publish(cache, text)
    cache.evict(2)
    assert explain(cache, "abcdXX") is MissReason.COLD
    assert explain(cache, "efghXX") is MissReason.EVICTED


def test_a_fingerprint_is_of_the_namespace_and_the_prefix_alone() -> None:
    fingerprint = prefix_fingerprint(1, spell("abcdef"), 16)
    assert fingerprint == prefix_fingerprint(1, spell("abcdXX"), 16)
    assert fingerprint != prefix_fingerprint(2, spell("abcdef"), 16)
    assert fingerprint != prefix_fingerprint(1, spell("abcdef"), 20)


def test_reasons_are_their_names() -> None:
    assert all(reason.value == reason.name for reason in MissReason)


# The namespaces of an adapter before and after it was loaded again with other weights.
OLD, NEW = Namespace("model", adapter="digest 1"), Namespace("model", adapter="digest 2")


def explain_changed(cache: PrefixCache, text: str) -> MissReason:
    tokens = spell(text)
    return cache.explain(NEW, tokens, cache.match(NEW, tokens).cached_tokens, [PromptKey(OLD, tokens)])


def drain(cache: PrefixCache, namespace: Namespace) -> None:
    all_slices(cache.purge_adapter_in_slices(namespace.adapter))


def test_tokens_cached_under_the_former_adapter_are_reported_as_adapter_changed() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh", OLD)
    assert explain_changed(cache, "abcdefgh") is MissReason.ADAPTER_CHANGED
    assert explain_changed(cache, "XXcdefgh") is MissReason.COLD
    assert cache.match(NEW, spell("abcdefgh")).cached_tokens == 0


def test_tokens_that_drained_with_the_former_adapter_are_reported_as_adapter_changed() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh", OLD)
    drain(cache, OLD)
    assert cache.pool.num_free == 16
    assert explain_changed(cache, "abcdXXXX") is MissReason.ADAPTER_CHANGED
    assert explain_changed(cache, "XXXXefgh") is MissReason.COLD
    publish(cache, "abcd", NEW)
    assert explain_changed(cache, "abcd") is MissReason.NONE


def test_only_more_than_is_cached_now_is_reported_as_a_change() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh", OLD)
    publish(cache, "abcdXXXX", NEW)
    assert explain_changed(cache, "abcdefgh") is MissReason.ADAPTER_CHANGED
    assert explain_changed(cache, "abcdYYYY") is MissReason.DIVERGED


def test_an_eviction_under_the_new_adapter_is_reported_first() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh", OLD)
    publish(cache, "abcdefgh", NEW)
    drain(cache, OLD)
    cache.evict(2)
    assert explain_changed(cache, "abcdefgh") is MissReason.EVICTED


def test_an_adapter_that_is_loaded_again_unchanged_was_evicted() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh", OLD)
    drain(cache, OLD)
    assert explain(cache, "abcdefgh", OLD) is MissReason.EVICTED


def test_a_purge_is_no_change_of_an_adapter() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh", OLD)
    cache.purge(adapter=OLD.adapter)
    assert explain_changed(cache, "abcdefgh") is MissReason.COLD


def test_a_change_is_reported_to_its_own_tenant_only() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh", OLD._replace(tenant="acme"))
    assert explain_changed(cache, "abcdefgh") is MissReason.COLD
    drain(cache, OLD)
    assert explain_changed(cache, "abcdefgh") is MissReason.COLD
