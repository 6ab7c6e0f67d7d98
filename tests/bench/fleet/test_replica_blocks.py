from __future__ import annotations

from bench.fleet.replica_blocks import ReplicaBlocks


def test_the_least_recently_used_conversation_is_evicted_first_from_its_end() -> None:
    replica = ReplicaBlocks()
    assert replica.hold(1, [10, 11, 12]) == [10, 11, 12]
    assert replica.hold(2, [20, 21]) == [20, 21]
    assert replica.hold(1, [10, 11, 12, 13]) == [13]
    assert replica.hold(3, [30]) == [30]
    assert replica.evict(1) == [21]
    assert replica.evict(3) == [20, 13, 12]
    assert replica.conversations == [1, 3]
    assert replica.hold(1, [10, 11, 12]) == [12]


def test_the_most_recently_used_conversation_is_not_evicted() -> None:
    replica = ReplicaBlocks()
    replica.hold(1, [10])
    replica.hold(2, [20, 21])
    assert replica.evict(5) == [10]
    assert replica.conversations == [2]
