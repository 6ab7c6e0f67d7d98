"""The base class of eviction policies."""

from __future__ import annotations

from typing import Any

from radixkv.cache.changes import Listener
from radixkv.cache.node import NUM_FOLLOWED_NODES, Node


class EvictionPolicy(Listener):
    """Orders the leaves that no lease uses. The first leaf is evicted next.

    A policy is a subclass with a `key`: the leaf with the smallest key is evicted first. It may also put leaves into
    kinds, and say what a leaf of a kind is worth at any time. Then the leaf of the least worth is evicted first, among
    those with the smallest and the greatest key of each kind. As a listener a policy is notified of every change to the
    trees, and it may store what it needs in `Node.policy_note`. This class counts the uses of each node.

    Attributes:
        has_kinds: whether the policy has a `kind` and a `worth`.
    """

    has_kinds = False

    def key(self, node: Node) -> Any:
        """Return the sort key of a node. Called whenever the node is put into the eviction queue.

        The keys of one policy must be comparable. Leaves with equal keys are evicted in the order in which they were
        put into the queue. By default the key is the time of the last use, in seconds.
        """
        return node.last_used_s

    def kind(self, node: Node) -> int:
        """Return the kind of a node. Called whenever the node is put into the eviction queue."""
        return 0

    def worth(self, kind: int, key: Any, now_s: float) -> float:
        """Return what it is worth to keep a leaf with this kind and key."""
        raise NotImplementedError

    def note_awaits(self, node: Node) -> None:
        """Take note of `Node.awaits`, which was set.

        When the last lease of a node ends with UNKNOWN, this is not called: the use has reset it.
        """

    def num_offered_blocks(self, leaf: Node) -> int:
        """Return how many blocks may be evicted from a leaf's end before it needs a new key.

        The number is at least one, and by default that of all its blocks. The method is called for the first leaf of
        the queue when blocks are needed.
        """
        return leaf.num_blocks

    def are_alike(self, upper: Node, lower: Node) -> bool:
        """Return whether a node and its only child, last used at the same time, may become one node.

        Their keys should be equal, so that joining them does not change when they are evicted. By default they are
        alike if they had the same number of uses. Paths with too many nodes are joined without calling this.
        """
        return upper.num_uses == lower.num_uses

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Count a use of the nodes that the first `num_bytes` of the path cover completely; see `used_nodes`."""
        for used in used_nodes(node, num_bytes):
            used.num_uses += 1

    def loaded_ahead(self, node: Node, num_bytes: int) -> None:
        """A lease was opened that found the first `num_bytes` of the path, and only loads the blocks after them.

        It is no use of the path, although it changes `last_used_s` after this call, so that the blocks wait for the
        next use as long as if they had just been used.
        """

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Count a use of the upper half."""
        assert lower.parent is not None
        lower.parent.num_uses += 1


def used_nodes(node: Node, num_bytes: int) -> list[Node]:
    """List the nodes that the first `num_bytes` of the path to the end of `node` cover completely, the deepest first.

    Of a deep path only the last `NUM_FOLLOWED_NODES` are listed.
    """
    nodes: list[Node] = []
    if node.parent is not None and node.start_bytes + len(node.tokens) > num_bytes:
        node = node.parent
    while node.parent is not None and len(nodes) < NUM_FOLLOWED_NODES:
        nodes.append(node)
        node = node.parent
    return nodes
