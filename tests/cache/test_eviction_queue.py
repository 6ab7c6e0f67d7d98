"""The eviction queue: which leaf is evicted next, compared with a search through all leaves."""

from __future__ import annotations

import itertools
import random

import pytest

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.eviction_queue import EvictionQueue, TenantEvictionQueues
from radixkv.cache.node import Node, Owner
from radixkv.cache.policies import LeastRecentlyUsed
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tenants import Quota, Tenants, TenantUsage
from radixkv.namespace import Namespace
from tests.fakes import make_tree


class TwoKinds(EvictionPolicy):
    """Leaves that were last used at an even second are worth their age in seconds. The others are worth 5."""

    has_kinds = True

    def kind(self, node: Node) -> int:
        return int(node.last_used_s) % 2

    def worth(self, kind: int, key: float, now_s: float) -> float:
        return 5.0 if kind else now_s - key


def make_queues(policy: EvictionPolicy | None = None) -> TenantEvictionQueues:
    """Make queues of tenants each of which has a queue of its own."""
    tenants = Tenants({}, Quota(ceiling_blocks=1000))
    return TenantEvictionQueues(policy or LeastRecentlyUsed(), tenants, itertools.count())


def leaf_of(tenant: str, last_used_s: float) -> Node:
    tree = RadixTree(Owner(Namespace("model", tenant=tenant), TenantUsage(tenant, Quota()), 4))
    node = Node(tree.owner, tree.root, 0, b"\0\0\0\0", b"\0\0\0\0", 0)
    node.last_used_s = last_used_s
    return node


def first_leaf(queues: TenantEvictionQueues) -> Node | None:
    entry = queues.first((), 0.0)
    return None if entry is None else entry[-1]


@pytest.mark.parametrize("seed", range(5))
def test_the_first_leaf_of_all_tenants_is_the_least_recently_used_one(seed: int) -> None:
    dice, queues, queued = random.Random(seed), make_queues(), set[Node]()
    for now_s in range(3000):
        if queued and dice.random() < 0.5:
            node = dice.choice(sorted(queued, key=lambda each: each.last_used_s))
            queued.remove(node)
            queues.remove(node)
            if dice.random() < 0.5:  # the leaf is used, and then waits again
                node.last_used_s = now_s + dice.random()
                queues.add(node)
                queued.add(node)
        else:
            node = leaf_of(str(dice.randrange(20)), dice.random() * now_s)
            queues.add(node)
            queued.add(node)
        assert len(queues) == len(queued)
        assert first_leaf(queues) is min(queued, key=lambda each: each.last_used_s, default=None)


def test_the_leaf_of_the_least_worth_is_first_among_the_oldest_and_newest_leaves_of_each_kind() -> None:
    queues = make_queues(TwoKinds())
    nodes = {last_used_s: leaf_of("a", last_used_s) for last_used_s in (1.0, 2.0, 3.0, 4.0, 6.0)}
    for node in nodes.values():
        queues.add(node)

    def first_at(now_s: float) -> Node:
        entry = queues.first((), now_s)
        assert entry is not None
        return entry[-1]

    assert (
        first_at(7.0) is nodes[6.0]
    )  # worth 1, which counts as 1.3: the newest leaf of a kind must be worth clearly less
    assert first_at(9.5) is nodes[6.0]  # worth 3.5, which counts as 4.55, less than the 5 of the other kind
    assert (
        first_at(10.0) is nodes[1.0]
    )  # worth 5, the oldest leaf of its kind; the newest even one is worth 4, which counts as 5.2
    nodes[3.0].priority = 10
    queues.remove(nodes[3.0])
    queues.add(nodes[3.0])
    assert first_at(7.0) is nodes[3.0]


def test_a_tenants_own_queue_forgets_leaves_that_are_removed() -> None:
    queues, node = make_queues(), leaf_of("a", 0.0)
    queues.add(node)
    for now_s in range(100):
        queues.remove(node)
        node.last_used_s = now_s
        queues.add(node)
    assert len(queues) == 1
    queues.remove(node)
    assert queues.first((), 0.0) is None
    assert queues.first_of("a", 0.0) is None
    assert len(queues) == 0


def test_a_tenant_without_leaves_has_no_first_leaf() -> None:
    queues = make_queues()
    assert queues.first_of("a", 0.0) is None
    node = leaf_of("a", 1.0)
    queues.add(node)
    entry = queues.first_of("a", 0.0)
    assert entry is not None
    assert entry[-1] is node


def test_tenants_with_and_without_a_quota_are_in_one_order() -> None:
    queue = EvictionQueue(LeastRecentlyUsed(), Tenants({"named": Quota()}, Quota(ceiling_blocks=5)))
    nodes = [leaf_of("named", 2.0), leaf_of("a", 1.0), leaf_of("b", 3.0)]
    for node in nodes:
        queue.add(node)
    assert queue.first((), 0.0) is nodes[1]
    assert queue.first_of("b", 0.0) is nodes[2]
    assert queue.first_of("c", 0.0) is None
    queue.discard(nodes[1])
    assert queue.first((), 0.0) is nodes[0]
    assert queue.first({"named"}, 0.0) is nodes[2]
    assert len(queue) == 2


def first_in(queue: EvictionQueue) -> Node:
    leaf = queue.first((), 0.0)
    assert leaf is not None
    return leaf


def make_queue() -> EvictionQueue:
    return EvictionQueue(LeastRecentlyUsed(), Tenants({}))


def idle_node(last_used_s: float) -> Node:
    tree = make_tree(4)
    node = Node(tree.owner, tree.root, 0, b"\0\0\0\0", b"\0\0\0\0", 0)
    node.last_used_s = last_used_s
    return node


def test_a_queue_is_in_the_policys_order() -> None:
    queue = make_queue()
    nodes = [idle_node(seconds) for seconds in (3.0, 1.0, 2.0)]
    for node in nodes:
        queue.add(node)
    order = []
    while len(queue):
        order.append(first_in(queue))
        queue.discard(order[-1])
    assert order == [nodes[1], nodes[2], nodes[0]]


def test_adding_twice_and_discarding_twice_change_nothing() -> None:
    queue, node = make_queue(), idle_node(1.0)
    queue.discard(node)
    queue.add(node)
    queue.add(node)
    assert len(queue) == 1
    assert node in queue
    queue.discard(node)
    queue.discard(node)
    assert len(queue) == 0
    assert node not in queue


def test_the_key_of_a_leaf_is_computed_when_it_is_added() -> None:
    queue, early, late = make_queue(), idle_node(1.0), idle_node(2.0)
    queue.add(early)
    queue.add(late)
    early.last_used_s = 3.0
    assert first_in(queue) is early
    queue.discard(early)
    queue.add(early)
    assert first_in(queue) is late


def test_an_empty_queue_has_no_first_leaf() -> None:
    assert make_queue().first((), 0.0) is None
