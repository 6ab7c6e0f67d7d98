"""The eviction queue: which leaf is evicted next, compared with a search through all leaves."""

from __future__ import annotations

import itertools
import random

import pytest

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.eviction_queue import EvictionQueue, LeafQueue, TenantEvictionQueues
from radixkv.cache.node import Node, Owner
from radixkv.cache.policies import LeastRecentlyUsed
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tenants import Quota, Tenants, TenantUsage
from radixkv.namespace import Namespace
from tests.fakes import make_tree


class EitherWay(EvictionPolicy):
    """Least or most recently used leaves first."""

    def key(self, node: Node) -> float:
        return node.last_used_s if self.generation % 2 == 0 else -node.last_used_s


def make_queues(policy: EvictionPolicy | None = None) -> TenantEvictionQueues:
    """Make queues of tenants that each have their own."""
    tenants = Tenants({}, Quota(ceiling_blocks=1000))
    return TenantEvictionQueues(policy or LeastRecentlyUsed(), tenants, itertools.count())


def leaf_of(tenant: str, last_used_s: float) -> Node:
    tree = RadixTree(Owner(Namespace("model", tenant=tenant), TenantUsage(Quota()), 4))
    node = Node(tree.owner, tree.root, 0, b"\0\0\0\0", b"\0\0\0\0", 0)
    node.last_used_s = last_used_s
    return node


def first_of(queues: TenantEvictionQueues) -> Node | None:
    entry = queues.first(())
    return None if entry is None else entry[-1]


@pytest.mark.parametrize("seed", range(5))
def test_the_first_of_all_is_the_first_of_any(seed: int) -> None:
    dice, queues, there = random.Random(seed), make_queues(), set[Node]()
    for now in range(3000):
        if there and dice.random() < 0.5:
            node = dice.choice(sorted(there, key=lambda each: each.last_used_s))
            there.remove(node)
            queues.remove(node)
            if dice.random() < 0.5:  # used again
                node.last_used_s = now + dice.random()
                queues.add(node)
                there.add(node)
        else:
            node = leaf_of(str(dice.randrange(20)), dice.random() * now)
            queues.add(node)
            there.add(node)
        assert len(queues) == len(there)
        assert first_of(queues) is min(there, key=lambda each: each.last_used_s, default=None)


@pytest.mark.parametrize("seed", range(5))
def test_queues_follow_a_policy_that_changes_its_order(seed: int) -> None:
    dice, policy = random.Random(seed), EitherWay()
    queues, there = make_queues(policy), set[Node]()
    for round_number in range(8):
        for _ in range(300):
            node = leaf_of(str(dice.randrange(40)), dice.random())
            queues.add(node)
            there.add(node)
        policy.generation += dice.randrange(1, 3)
        for _ in range(150):  # some leaves are removed and added again while queues move
            node = dice.choice(sorted(there, key=lambda each: each.last_used_s))
            queues.remove(node)
            queues.add(node)
            assert first_of(queues) in there
        while there and (round_number == 7 or dice.random() < 0.99):
            first = first_of(queues)
            assert first is min(there, key=policy.key)
            queues.remove(first)
            there.remove(first)
    assert first_of(queues) is None
    assert len(queues) == 0


def test_leaves_that_are_used_again_and_again_leave_no_entries_behind() -> None:
    queues, node = make_queues(), leaf_of("a", 0.0)
    queues.add(node)
    for now in range(10_000):
        queues.remove(node)
        node.last_used_s = now
        queues.add(node)
    assert queues.num_heap_entries < 100
    queues.remove(node)
    assert queues.first(()) is None
    assert len(queues) == 0


def test_a_tenant_without_leaves_has_no_first_leaf() -> None:
    queues = make_queues()
    assert queues.first_of("a") is None
    node = leaf_of("a", 1.0)
    queues.add(node)
    entry = queues.first_of("a")
    assert entry is not None
    assert entry[-1] is node


def test_tenants_with_and_without_a_quota_are_in_one_order() -> None:
    queue = EvictionQueue(LeastRecentlyUsed(), Tenants({"named": Quota()}, Quota(ceiling_blocks=5)))
    nodes = [leaf_of("named", 2.0), leaf_of("a", 1.0), leaf_of("b", 3.0)]
    for node in nodes:
        queue.add(node)
    assert queue.first(spared=()) is nodes[1]
    assert queue.first_of("b") is nodes[2]
    assert queue.first_of("c") is None
    queue.discard(nodes[1])
    assert queue.first(spared=()) is nodes[0]
    assert queue.first(spared={"named"}) is nodes[2]
    assert len(queue) == 2


def first_in(queue: LeafQueue) -> Node:
    entry = queue.first()
    assert entry is not None
    return entry[-1]


def idle_node(last_used_s: float) -> Node:
    tree = make_tree(4)
    node = Node(tree.owner, tree.root, 0, b"\0\0\0\0", b"\0\0\0\0", 0)
    node.last_used_s = last_used_s
    return node


def test_a_queue_is_in_the_policys_order() -> None:
    queue = LeafQueue(LeastRecentlyUsed(), itertools.count())
    nodes = [idle_node(seconds) for seconds in (3.0, 1.0, 2.0)]
    for node in nodes:
        queue.add(node)
    order = []
    while len(queue):
        order.append(first_in(queue))
        queue.remove(order[-1])
    assert order == [nodes[1], nodes[2], nodes[0]]


def test_adding_twice_and_discarding_twice_change_nothing() -> None:
    queue, node = EvictionQueue(LeastRecentlyUsed(), Tenants({})), idle_node(1.0)
    queue.discard(node)
    queue.add(node)
    queue.add(node)
    assert len(queue) == 1
    assert node in queue
    queue.discard(node)
    queue.discard(node)
    assert len(queue) == 0
    assert node not in queue


def test_the_key_of_a_leaf_is_taken_when_it_is_added() -> None:
    queue, early, late = LeafQueue(LeastRecentlyUsed(), itertools.count()), idle_node(1.0), idle_node(2.0)
    queue.add(early)
    queue.add(late)
    early.last_used_s = 3.0
    assert first_in(queue) is early
    queue.remove(early)
    queue.add(early)
    assert first_in(queue) is late


def test_an_empty_queue_has_no_first_leaf() -> None:
    assert LeafQueue(LeastRecentlyUsed(), itertools.count()).first() is None
