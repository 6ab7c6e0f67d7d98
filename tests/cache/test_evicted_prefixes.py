from radixkv.api.miss_reason import MissReason
from radixkv.cache.evicted_prefixes import EvictedPrefixes
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from tests.fakes import FakeClock, cached, make_tree, publish, spell


def record_eviction(evicted_prefixes: EvictedPrefixes, fingerprint: int, reason: MissReason) -> None:
    evicted_prefixes.evicted(make_tree(4).root, 1, fingerprint, reason, now_s=0.0)


def test_the_oldest_eviction_is_forgotten_first() -> None:
    evicted_prefixes = EvictedPrefixes(2, InvocationMarks())
    for fingerprint in (1, 2, 3):
        record_eviction(evicted_prefixes, fingerprint, MissReason.EVICTED)
    assert [evicted_prefixes.reason(fingerprint) for fingerprint in (1, 2, 3)] == [
        None,
        MissReason.EVICTED,
        MissReason.EVICTED,
    ]
    assert len(evicted_prefixes) == 2


def test_a_prefix_that_is_evicted_again_counts_as_evicted_last() -> None:
    evicted_prefixes = EvictedPrefixes(2, InvocationMarks())
    for fingerprint in (1, 2, 1, 3):
        record_eviction(evicted_prefixes, fingerprint, MissReason.EVICTED)
    assert evicted_prefixes.reason(1) is MissReason.EVICTED
    assert evicted_prefixes.reason(2) is None


def test_the_latest_reason_counts() -> None:
    evicted_prefixes = EvictedPrefixes(2, InvocationMarks())
    record_eviction(evicted_prefixes, 1, MissReason.EVICTED)
    record_eviction(evicted_prefixes, 1, MissReason.EXPIRED)
    assert evicted_prefixes.reason(1) is MissReason.EXPIRED
    assert len(evicted_prefixes) == 1


def test_a_capacity_of_zero_remembers_nothing() -> None:
    evicted_prefixes = EvictedPrefixes(0, InvocationMarks())
    record_eviction(evicted_prefixes, 1, MissReason.EVICTED)
    assert evicted_prefixes.reason(1) is None


def test_it_is_recorded_whether_a_tenant_evicted_its_prefix_itself() -> None:
    clock = FakeClock()
    cache = PrefixCache(4, 4, clock=clock)
    namespaces = {tenant: Namespace("model", tenant) for tenant in "ab"}
    # The pool has room for two prompts: the third one evicts the first one, and the fourth one the second one.
    for tenant, text in (("a", "aaaabbbb"), ("a", "ccccdddd"), ("a", "eeeeffff"), ("b", "gggghhhh")):
        clock.now_s += 1
        publish(cache, text, namespaces[tenant])

    def is_by_self(text: str) -> bool | None:
        namespace = namespaces["a"]
        return cache.is_evicted_by_self(namespace, spell(text + "z"), cached(cache, text, namespace))

    assert is_by_self("aaaabbbb") is True
    assert is_by_self("ccccdddd") is False
    assert is_by_self("nnnnnnnn") is None, "this prompt was never evicted"
