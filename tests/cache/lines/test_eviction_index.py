"""Lines of unused leaves, each in the order of its policy."""

from __future__ import annotations

import itertools

from radixkv.cache.lines.eviction_index import EvictionIndex
from radixkv.cache.node import Node
from radixkv.cache.policies import LeastRecentlyUsed
from tests.fakes import make_tree


def first_of(index: EvictionIndex) -> Node:
    entry = index.first()
    assert entry is not None
    return entry[-1]


def idle_node(last_used_s: float) -> Node:
    tree = make_tree(4)
    node = Node(tree.owner, tree.root, 0, b"\0\0\0\0", b"\0\0\0\0", 0)
    node.last_used_s = last_used_s
    return node


def test_the_index_is_in_the_policys_order() -> None:
    index = EvictionIndex(LeastRecentlyUsed(), itertools.count())
    nodes = [idle_node(seconds) for seconds in (3.0, 1.0, 2.0)]
    for node in nodes:
        index.add(node)
    order = []
    while len(index):
        order.append(first_of(index))
        index.discard(order[-1])
    assert order == [nodes[1], nodes[2], nodes[0]]


def test_adding_twice_and_discarding_twice_change_nothing() -> None:
    index, node = EvictionIndex(LeastRecentlyUsed(), itertools.count()), idle_node(1.0)
    index.discard(node)
    index.add(node)
    index.add(node)
    assert len(index) == 1
    assert node in index
    index.discard(node)
    index.discard(node)
    assert len(index) == 0
    assert node not in index


def test_a_place_in_line_is_taken_on_arrival() -> None:
    index, early, late = EvictionIndex(LeastRecentlyUsed(), itertools.count()), idle_node(1.0), idle_node(2.0)
    index.add(early)
    index.add(late)
    early.last_used_s = 3.0
    assert first_of(index) is early
    index.discard(early)
    index.add(early)
    assert first_of(index) is late


def test_an_empty_index_has_no_first() -> None:
    assert EvictionIndex(LeastRecentlyUsed(), itertools.count()).first() is None
