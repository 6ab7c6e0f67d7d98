"""What an eviction policy is asked and told."""

from __future__ import annotations

from typing import Any

from radixkv.cache.node import Node


class EvictionPolicy:
    """A sort key for leaves that nobody uses: the smallest goes first.

    A policy is one subclass with a `key`. The other methods tell it what happens in the cache, and do what most
    policies need. Times are seconds of the cache's clock.

    Attributes:
        generation: a policy that changes its order raises it, and the leaves get new keys.
    """

    generation = 0

    def key(self, node: Node) -> Any:
        """The node's place in line, taken when it becomes evictable; by default the time of its last use.

        Keys of one policy are comparable. Leaves with equal keys go in the order in which they fell idle.
        """
        return node.last_used_s

    def num_offered_blocks(self, leaf: Node) -> int:
        """How many blocks may be cut off a leaf's end before it gets a new key; at least one. All of them, if not said.

        Asked of the first in line, when blocks are needed.
        """
        return leaf.num_blocks

    def reused(self, node: Node, num_bytes: int, now_s: float) -> None:
        """A lease begins that found the first `num_bytes` of the path to a node's end. Its nodes count a use.

        Called before the path's `last_used_s` changes. A node of which only the beginning was found is not used: if
        the rest of the prompt comes, the node is split, and its upper half is.

        Complexity: O(depth).
        """
        for used in used_nodes(node, num_bytes):
            used.num_uses += 1

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """A node was cut in two, because a prompt shares its upper half only, which counts a use.

        `last_used_s` is when it was used before.
        """
        assert lower.parent is not None
        lower.parent.num_uses += 1

    def cut(self, lower: Node) -> None:
        """A node was cut in two for the cache's own purposes, not by a use. Both halves have its `policy_note`."""

    def inserted(self, leaf: Node, now_s: float) -> None:
        """A leaf is new, or has grown."""

    def evicted(self, leaf: Node, num_blocks: int, now_s: float) -> None:
        """So many blocks are about to be cut off a leaf's end, perhaps all."""


def used_nodes(node: Node, num_bytes: int) -> list[Node]:
    """The nodes that the first `num_bytes` of the path to a node's end cover whole, the deepest first."""
    nodes: list[Node] = []
    path_bytes = 0
    while node.parent is not None:
        nodes.append(node)
        path_bytes += len(node.tokens)
        node = node.parent
    return nodes[1:] if path_bytes > num_bytes else nodes
