"""The nodes that requests used recently, for shared stores, which do not see that blocks are used on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from radixkv.cache.node import Node
from radixkv.tokens import TOKEN_BYTES


class UsedNodes:
    """Collects the paths that were used since the last `take`, and follows their nodes while the trees change.

        use, use, use ──▶ take: the keys, tails first ──▶ touched in the stores ──▶ taken: where their K/V is now

    A use covers all blocks from the root to its end, so it is one entry, whatever the length of the prompt. The entries
    refer only to nodes that are in a tree.

    Args:
        block_size: tokens per block.

    Attributes:
        taken: the nodes of the last `take`, updated for splits and joins since then.
    """

    def __init__(self, block_size: int) -> None:
        self.taken: set[Node] = set()
        self._block_bytes = block_size * TOKEN_BYTES
        self._end_bytes: dict[Node, int] = {}  # where the longest use that ends in a node ends, oldest use first

    def __bool__(self) -> bool:
        """Whether there are uses to take."""
        return bool(self._end_bytes)

    def add(self, node: Node, num_bytes: int) -> None:
        """Record a use of the first `num_bytes` of the path to the end of a node."""
        if self._end_bytes.get(node, 0) < num_bytes:
            self._end_bytes[node] = num_bytes

    def split(self, lower: Node) -> None:
        """Follow a node that was split: a use of it also covers the upper half, which is its parent now."""
        if lower in self.taken and lower.parent is not None:
            self.taken.add(lower.parent)

    def joined(self, uppers: Sequence[Node], lower: Node) -> None:
        """Follow nodes that were merged into one."""
        for upper in uppers:
            self.add(lower, self._end_bytes.pop(upper, 0))
            if upper in self.taken:
                self.taken.remove(upper)
                self.taken.add(lower)

    def evicted(self, leaf: Node) -> None:
        """Forget a leaf that is evicted. A use of it remains a use of the path above it."""
        self.taken.discard(leaf)
        num_bytes = self._end_bytes.pop(leaf, 0)
        if num_bytes and leaf.parent is not None and leaf.parent.parent is not None:
            self.add(leaf.parent, min(num_bytes, leaf.start_bytes))

    def purged(self, node: Node) -> None:
        """Forget a node that is purged, and its uses."""
        self.taken.discard(node)
        self._end_bytes.pop(node, None)

    def take(self, max_blocks: int) -> list[bytes]:
        """Return the keys of used blocks, and forget their uses.

        The oldest uses are taken first, until their nodes have at least `max_blocks` keys.

        Returns:
            The keys of whole blocks, without duplicates. A block comes before all blocks that precede it in a prompt.
            Blocks that were never stored have no keys.

        Complexity: O(returned blocks), and O(depth) per use.
        """
        end_bytes: dict[Node, int] = {}
        num_blocks = num_uses = 0
        for used, num_bytes in self._end_bytes.items():
            node: Node | None = used
            while node is not None and node.parent is not None and end_bytes.get(node, 0) < num_bytes:
                num_blocks += len(node.keys or ()) if node not in end_bytes else 0
                end_bytes[node] = num_bytes
                num_bytes = node.start_bytes
                node = node.parent
            num_uses += 1
            if num_blocks >= max_blocks:
                break
        for used in list(islice(self._end_bytes, num_uses)):
            del self._end_bytes[used]
        self.taken = set(end_bytes)
        keys: list[bytes] = []
        for node in sorted(end_bytes, key=lambda node: -node.start_bytes):
            num_whole_blocks = (end_bytes[node] - node.start_bytes) // self._block_bytes
            keys += (node.keys or [])[: max(0, num_whole_blocks)][::-1]
        return keys
