from __future__ import annotations

from radixkv.api.miss_reason import MissReason
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import Namespace
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


def test_a_prompt_that_goes_its_own_way_diverged() -> None:
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


def test_what_was_forgotten_long_ago_is_cold() -> None:
    cache = PrefixCache(16, 4, clock=FakeClock(), evicted_prefixes=1)
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
