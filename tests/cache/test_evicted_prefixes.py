from radixkv.api.miss_reason import MissReason
from radixkv.cache.evicted_prefixes import EvictedPrefixes
from radixkv.invocation import InvocationMarks
from tests.fakes import make_tree


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


def test_a_memory_of_nothing_remembers_nothing() -> None:
    lost = EvictedPrefixes(0, InvocationMarks())
    lose(lost, 1, MissReason.EVICTED)
    assert lost.reason(1) is None
