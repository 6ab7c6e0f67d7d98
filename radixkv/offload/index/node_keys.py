"""Keys of the blocks in the radix trees."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.node import Node, path_to
from radixkv.offload.index.prompt_blocks import BlockKeyFunction, KeyedBlock
from radixkv.tokens import TOKEN_BYTES


class NodeKeys:
    """Computes the keys of the blocks of nodes, and keeps them in the nodes, so that later keys can continue from them.

    A key depends on the namespace and on all tokens up to the end of its block. Neither changes while the block is in a
    tree, so computed keys stay valid. A node keeps the keys of its first blocks, and later keys continue from there:

        root ── [k1 k2 k3] ─┬─ [k4 k5 .. ..]        `..` is a block whose key was not computed yet
                            └─ [.. ..]              all nodes above a node with keys have all of their keys

    A key takes 73 bytes: 65 for the `bytes` object and 8 for the reference to it. If a tier index holds the same
    object, only the reference is additional. A node has no keys if no block at or below it was queued.

    Args:
        key_blocks: computes keys.
        block_size: tokens per block.
    """

    def __init__(self, key_blocks: BlockKeyFunction, block_size: int) -> None:
        self._key_blocks = key_blocks
        self._block_bytes = block_size * TOKEN_BYTES

    def blocks(self, node: Node, start: int, end: int, prefix_tokens: bytes) -> list[KeyedBlock]:
        """Return the blocks of a node in `[start, end)` with their keys, except a last one that is not full.

        Args:
            node: a node of a tree.
            start, end: half-open range of its blocks.
            prefix_tokens: tokens of the public prefix above the tree; empty without one.

        Complexity: O(depth), and a hash of the tokens of these blocks and of all earlier blocks whose keys were not
        computed yet.
        """
        parent = self._key_of_prefix(prefix_tokens, node)
        for above in path_to(node.parent):
            parent = self._key_after(above, above.num_blocks, parent)
        parent = self._key_after(node, start, parent)
        blocks = self._keyed(node, start, end, parent)
        keys = _keys_of(node)
        # The node keeps at least the keys before `start`, and perhaps some of these blocks.
        keys.extend(block.key for block in blocks[len(keys) - start :])
        return blocks

    def split(self, lower: Node) -> None:
        """Divide the keys between the two halves of a split node."""
        upper = lower.parent
        if lower.keys is not None and upper is not None:
            num_blocks = upper.num_blocks
            upper.keys, lower.keys = lower.keys[:num_blocks], lower.keys[num_blocks:]

    def joined(self, uppers: Sequence[Node], lower: Node) -> None:
        """Merge the keys of nodes that are joined."""
        lower.keys = [key for node in (*uppers, lower) for key in node.keys or ()] or None

    def shortened(self, leaf: Node, num_blocks: int) -> None:
        """Forget the keys of a leaf after its first `num_blocks` blocks, since other tokens may follow these."""
        if leaf.keys is not None:
            del leaf.keys[num_blocks:]

    def _key_of_prefix(self, prefix_tokens: bytes, node: Node) -> bytes | None:
        """Return the key of the last block of the public prefix, which the root keeps; None without one."""
        if not prefix_tokens:
            return None
        root = node
        while root.parent is not None:
            root = root.parent
        keys = _keys_of(root)
        if not keys:
            *_, last = self._key_blocks(node.owner.namespace._replace(public_prefix=""), prefix_tokens)
            keys.append(last.key)
        return keys[0]

    def _key_after(self, node: Node, num_blocks: int, parent: bytes | None) -> bytes | None:
        """Return the key of the last of the first `num_blocks` blocks of a node; `parent` if that is 0."""
        keys = _keys_of(node)
        if len(keys) < num_blocks:
            new_blocks = self._keyed(node, len(keys), num_blocks, keys[-1] if keys else parent)
            keys.extend(block.key for block in new_blocks)
        return keys[num_blocks - 1] if num_blocks else parent

    def _keyed(self, node: Node, start: int, end: int, parent: bytes | None) -> list[KeyedBlock]:
        tokens = node.tokens[start * self._block_bytes : end * self._block_bytes]
        return list(self._key_blocks(node.owner.namespace._replace(public_prefix=""), tokens, parent))


def _keys_of(node: Node) -> list[bytes]:
    """Return the mutable list of the keys that a node keeps."""
    if node.keys is None:
        node.keys = []
    return node.keys
