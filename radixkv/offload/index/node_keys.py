"""Keys of the blocks that are in the trees."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.node import Node, path_to
from radixkv.offload.index.prompt_blocks import KeyBlocks, KeyedBlock
from radixkv.tokens import TOKEN_BYTES


class NodeKeys:
    """Keys the blocks of nodes, and hashes a token once for all blocks after it.

    A key depends on the namespace and on all tokens up to the end of its block. Neither changes while the block is in a
    tree. So nodes keep the keys that were made, always of their first blocks, and the blocks after these go on there:

        root ── [k1 k2 k3] ─┬─ [k4 k5 .. ..]        no key was made for a block `..` yet
                            └─ [.. ..]              nodes before one with keys have all of theirs

    That takes 8 bytes a block where a store has the key as well, otherwise 73; nothing in a node at or below which
    nothing was stored.

    Args:
        key_blocks: makes keys.
        block_size: tokens a block.
    """

    def __init__(self, key_blocks: KeyBlocks, block_size: int) -> None:
        self._key_blocks = key_blocks
        self._block_bytes = block_size * TOKEN_BYTES

    def blocks(self, node: Node, start: int, end: int, prefix_tokens: bytes) -> list[KeyedBlock]:
        """Key the blocks of a node from `start` to before `end`, but for a last one that is filled in part.

        Args:
            node: in a tree.
            start, end: of its blocks.
            prefix_tokens: tokens of the public prefix above the tree; empty without one.

        Complexity: O(depth), and a hash of these tokens and of those before them whose keys were not made yet.
        """
        parent = self._key_of_prefix(prefix_tokens, node)
        for above in path_to(node.parent):
            parent = self._key_after(above, above.num_blocks, parent)
        parent = self._key_after(node, start, parent)
        blocks = self._keyed(node, start, end, parent)
        keys = _keys_of(node)
        keys.extend(block.key for block in blocks[len(keys) - start :])
        return blocks

    def split(self, lower: Node) -> None:
        """Give both halves of a node their keys."""
        upper = lower.parent
        if lower.keys is not None and upper is not None:
            num_blocks = upper.num_blocks
            upper.keys, lower.keys = lower.keys[:num_blocks], lower.keys[num_blocks:]

    def joined(self, uppers: Sequence[Node], lower: Node) -> None:
        """Give a node the keys of those that are joined to it."""
        lower.keys = [key for node in (*uppers, lower) for key in node.keys or ()] or None

    def shortened(self, leaf: Node, num_blocks: int) -> None:
        """Forget the keys of a leaf but for its first blocks: others may come after these."""
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
        """Return the key of the last one of a node's first blocks, or that of the block before the node."""
        keys = _keys_of(node)
        if len(keys) < num_blocks:
            made = self._keyed(node, len(keys), num_blocks, keys[-1] if keys else parent)
            keys.extend(block.key for block in made)
        return keys[num_blocks - 1] if num_blocks else parent

    def _keyed(self, node: Node, start: int, end: int, parent: bytes | None) -> list[KeyedBlock]:
        tokens = node.tokens[start * self._block_bytes : end * self._block_bytes]
        return list(self._key_blocks(node.owner.namespace._replace(public_prefix=""), tokens, parent))


def _keys_of(node: Node) -> list[bytes]:
    """Return the keys that a node keeps, to be added to."""
    if node.keys is None:
        node.keys = []
    return node.keys
