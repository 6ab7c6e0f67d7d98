"""The leaf that goes first of many tenants, compared with a search through all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.lines.eviction_lines import EvictionLines
from radixkv.cache.lines.line_heap import LineHeap
from radixkv.cache.node import Node, Owner
from radixkv.cache.policies import LeastRecentlyUsed
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tenants import Quota, Tenants, TenantUsage
from radixkv.namespace import Namespace


class EitherWay(EvictionPolicy):
    """Least or most recently used leaves first."""

    def key(self, node: Node) -> float:
        return node.last_used_s if self.generation % 2 == 0 else -node.last_used_s


def make_heap(policy: EvictionPolicy | None = None) -> LineHeap:
    return LineHeap(policy or LeastRecentlyUsed(), itertools.count())


def leaf_of(tenant: str, last_used_s: float) -> Node:
    tree = RadixTree(Owner(Namespace("model", tenant=tenant), TenantUsage(Quota()), 4))
    node = Node(tree.owner, tree.root, 0, b"\0\0\0\0", b"\0\0\0\0", 0)
    node.last_used_s = last_used_s
    return node


def first_of(heap: LineHeap) -> Node | None:
    entry = heap.first()
    return None if entry is None else entry[-1]


@pytest.mark.parametrize("seed", range(5))
def test_the_first_of_all_is_the_first_of_any(seed: int) -> None:
    dice, heap, there = random.Random(seed), make_heap(), set[Node]()
    for now in range(3000):
        if there and dice.random() < 0.5:
            node = dice.choice(sorted(there, key=lambda each: each.last_used_s))
            there.remove(node)
            heap.discard(node)
            if dice.random() < 0.5:  # used again
                node.last_used_s = now + dice.random()
                heap.add(node)
                there.add(node)
        else:
            node = leaf_of(str(dice.randrange(20)), dice.random() * now)
            heap.add(node)
            there.add(node)
        assert len(heap) == len(there)
        assert first_of(heap) is min(there, key=lambda each: each.last_used_s, default=None)


@pytest.mark.parametrize("seed", range(5))
def test_lines_follow_a_policy_that_changes_its_order(seed: int) -> None:
    dice, policy = random.Random(seed), EitherWay()
    heap, there = make_heap(policy), set[Node]()
    for round_number in range(8):
        for _ in range(300):
            node = leaf_of(str(dice.randrange(40)), dice.random())
            heap.add(node)
            there.add(node)
        policy.generation += dice.randrange(1, 3)
        for _ in range(150):  # some leaves go, and come back, while lines move
            node = dice.choice(sorted(there, key=lambda each: each.last_used_s))
            heap.discard(node)
            heap.add(node)
            assert first_of(heap) in there
        while there and (round_number == 7 or dice.random() < 0.99):
            first = first_of(heap)
            assert first is min(there, key=policy.key)
            heap.discard(first)
            there.remove(first)
    assert first_of(heap) is None
    assert heap._lines == {}


def test_leaves_that_are_used_again_and_again_leave_no_entries_behind() -> None:
    heap, node = make_heap(), leaf_of("a", 0.0)
    for now in range(10_000):
        heap.discard(node)
        node.last_used_s = now
        heap.add(node)
    assert len(heap._heap) < 100
    heap.discard(node)
    assert heap.first() is None
    assert heap._lines == {}


def test_only_tenants_with_leaves_have_a_line() -> None:
    heap = make_heap()
    assert heap.first_of("a") is None
    heap.discard(leaf_of("a", 1.0))
    node = leaf_of("a", 1.0)
    heap.add(node)
    entry = heap.first_of("a")
    assert entry is not None
    assert entry[-1] is node


def test_lines_of_named_and_of_other_tenants_go_in_one_order() -> None:
    lines = EvictionLines(LeastRecentlyUsed(), Tenants({"named": Quota()}, Quota(ceiling_blocks=5)))
    nodes = [leaf_of("named", 2.0), leaf_of("a", 1.0), leaf_of("b", 3.0)]
    for node in nodes:
        lines.add(node)
    assert lines.first(spared=()) is nodes[1]
    assert lines.first_of("b") is nodes[2]
    assert lines.first_of("c") is None
    lines.discard(nodes[1])
    assert lines.first(spared=()) is nodes[0]
    assert lines.first(spared={"named"}) is nodes[2]
    assert len(lines) == 2
