from __future__ import annotations

from bench.fleet.replica_blocks import ReplicaBlocks


def test_the_least_recently_used_conversation_is_evicted_first_from_its_end() -> None:
    held = ReplicaBlocks()
    assert held.hold(1, [10, 11, 12]) == [10, 11, 12]
    assert held.hold(2, [20, 21]) == [20, 21]
    assert held.hold(1, [10, 11, 12, 13]) == [13]
    assert held.hold(3, [30]) == [30]
    assert held.evict(1) == [21]
    assert held.evict(3) == [20, 13, 12]
    assert held.conversations == [1, 3]
    assert held.hold(1, [10, 11, 12]) == [12]


def test_the_most_recently_used_conversation_is_not_evicted() -> None:
    held = ReplicaBlocks()
    held.hold(1, [10])
    held.hold(2, [20, 21])
    assert held.evict(5) == [10]
    assert held.conversations == [2]
