from radixkv.api.miss_reason import MissReason
from radixkv.cache.evicted_prefixes import EvictedPrefixes
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from tests.fakes import FakeClock, cached, make_tree, publish, spell


def lose(lost: EvictedPrefixes, fingerprint: int, reason: MissReason) -> None:
    lost.evicted(make_tree(4).root, 1, fingerprint, reason, now_s=0.0)


def test_the_oldest_note_is_forgotten_first() -> None:
    lost = EvictedPrefixes(2, InvocationMarks())
    for fingerprint in (1, 2, 3):
        lose(lost, fingerprint, MissReason.EVICTED)
    assert [lost.reason(fingerprint) for fingerprint in (1, 2, 3)] == [None, MissReason.EVICTED, MissReason.EVICTED]
    assert len(lost) == 2


def test_a_note_made_again_is_new() -> None:
    lost = EvictedPrefixes(2, InvocationMarks())
    for fingerprint in (1, 2, 1, 3):
        lose(lost, fingerprint, MissReason.EVICTED)
    assert lost.reason(1) is MissReason.EVICTED
    assert lost.reason(2) is None


def test_the_latest_reason_counts() -> None:
    lost = EvictedPrefixes(2, InvocationMarks())
    lose(lost, 1, MissReason.EVICTED)
    lose(lost, 1, MissReason.EXPIRED)
    assert lost.reason(1) is MissReason.EXPIRED
    assert len(lost) == 1


def test_a_capacity_of_zero_remembers_nothing() -> None:
    lost = EvictedPrefixes(0, InvocationMarks())
    lose(lost, 1, MissReason.EVICTED)
    assert lost.reason(1) is None


def test_it_is_known_for_whom_a_prefix_was_evicted() -> None:
    clock = FakeClock()
    cache = PrefixCache(4, 4, clock=clock)
    prompts = {name: Namespace("model", name) for name in "ab"}
    for name, text in (("a", "aaaabbbb"), ("a", "ccccdddd"), ("a", "eeeeffff"), ("b", "gggghhhh")):
        clock.now_s += 1
        publish(cache, text, prompts[name])

    def is_by_self(text: str) -> bool | None:
        return cache.is_evicted_by_self(prompts["a"], spell(text + "z"), cached(cache, text, prompts["a"]))

    assert is_by_self("aaaabbbb") is True
    assert is_by_self("ccccdddd") is False
    assert is_by_self("nnnnnnnn") is None
