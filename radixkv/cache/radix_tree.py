"""The radix tree of one namespace: runs of tokens, and the physical blocks that hold their K/V.

A match only reads; an insert adds. Blocks have four tokens here:

    insert [a b c d|e f g h|i j]            root ── [abcd|efgh|ij]            only a leaf may end inside a block
    insert [a b c d|x y]                    root ── [abcd] ┬─ [efgh|ij]       a split: the old object is the lower half,
                                                           └─ [xy]            so references to it stay right
    match  [a b c d|e f z z]                6 tokens: the block [efgh] is shared up to `f`; the caller copies it
    insert [a b c d|x y z z|w]              root ── [abcd] ┬─ [efgh|ij]       a leaf grows in place; the block [xy] is
                                                           └─ [xyzz|w]        replaced by its longer copy
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from radixkv.blocks import BLOCK_ID_BYTES
from radixkv.cache.node import ChildTable, Node, Owner
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint, shared_bytes


class Insertion(NamedTuple):
    """The outcome of an insert. The tree owns the offered blocks `[num_known_blocks, end)` now, unless `is_covered`.

    Attributes:
        node: the node in which the inserted run ends.
        known_bytes: bytes of the tokens of the run that were in the tree before; they may end within a block.
        known_block_ids: packed ids of the whole blocks at the beginning of the run that the tree held before.
        is_covered: whether the tree held the whole run before, and took no block.
        split: the lower half of the node that was cut in two; None if none was.
        replaced_block_ids: packed id of the partly filled block that a longer copy replaced; empty if none did.
    """

    node: Node
    known_bytes: int
    known_block_ids: bytes
    is_covered: bool
    split: Node | None
    replaced_block_ids: bytes

    @property
    def num_known_blocks(self) -> int:
        """Whole blocks at the beginning of the run that the tree held before."""
        return len(self.known_block_ids) // BLOCK_ID_BYTES


class RootPrefix(NamedTuple):
    """The tokens above a tree: whole blocks of a public prefix that several trees share. Empty for most trees.

    Attributes:
        tokens: little-endian uint32 bytes, whole blocks.
        block_ids: packed ids of their blocks, which stay published while a lease below them is open.
    """

    tokens: bytes = b""
    block_ids: bytes = b""


NO_ROOT_PREFIX = RootPrefix()


class RadixTree:
    """The cached tokens of one namespace. Tokens are compared, not hashes, so every match is exact.

    Positions count from the beginning of the prompt, also where the tree is rooted below a public prefix.

    Args:
        owner: namespace, counters and block size of all its nodes.
        root_prefix: the tokens and blocks above the tree.

    Attributes:
        root: the node above all others.

    Example:
        >>> from radixkv.cache.tenants import Quota, TenantUsage
        >>> from radixkv.namespace import Namespace
        >>> tree = RadixTree(Owner(Namespace("model"), TenantUsage("", Quota()), block_size=1))
        >>> token_a, token_b, token_c = (bytes([byte, 0, 0, 0]) for byte in b"abc")
        >>> tree.insert(token_a + token_b, block_ids=bytes(8)).known_bytes
        0
        >>> tree.match(token_a + token_c)[1]  # one token of four bytes
        4
    """

    def __init__(self, owner: Owner, root_prefix: RootPrefix = NO_ROOT_PREFIX) -> None:
        self.owner = owner
        self.root = Node(owner, None, 0, root_prefix.tokens, root_prefix.block_ids, 0)
        self._start_bytes = len(root_prefix.tokens)
        self._block_bytes = owner.block_size * TOKEN_BYTES
        self._seed = owner.namespace.seed

    def match(self, tokens: bytes) -> tuple[Node | None, int, bytes, int]:
        """Find the longest known prefix; it may end within a block. Changes nothing.

        Args:
            tokens: the prompt, which begins with the tokens of the root.

        Returns:
            The deepest node that shares at least one token, None if none does; the number of bytes that match; the
            packed ids of the blocks that hold them, of which the last one may match in part; the number of nodes
            visited. This is a plain tuple because a named one takes 0.2 us more.

        Complexity: one dict look-up and one memory comparison per node; at the end O(log siblings).
        """
        block_bytes = self._block_bytes
        node = self.root
        position = start_bytes = self._start_bytes
        packed_ids: list[bytes] = []
        while children := node.children:
            first_block = tokens[position : position + block_bytes]
            child = children.get(first_block)
            if child is None:
                child, shared = children.nearest(first_block)
            elif tokens.startswith(child.tokens, position):
                node = child
                position += len(child.tokens)
                packed_ids.append(child.block_ids)
                continue
            else:
                shared = shared_bytes(child.tokens, tokens, position)
            if shared:
                node = child
                position += shared
                packed_ids.append(child.block_ids[: -(-shared // block_bytes) * BLOCK_ID_BYTES])
            break
        deepest = node if position > start_bytes else None
        return deepest, position, self.root.block_ids + b"".join(packed_ids), len(packed_ids)

    def insert(self, tokens: bytes, block_ids: bytes, known_node: Node | None = None) -> Insertion:
        """Make a run of tokens matchable. The tree takes ownership of the blocks that it did not hold before.

        Args:
            tokens: the run: the tokens of the root, followed by at least one token.
            block_ids: packed ids of all its blocks, `ceil(tokens / block_size)`.
            known_node: a node on the path of the run, at which matching starts. The caller guarantees that the tree
                holds everything before this node, in the same blocks as `block_ids`.

        Complexity: O(len(tokens)) memory comparison, at most one split and one new leaf, and a dict look-up for each
        node of the path from `known_node` on.
        """
        block_bytes = self._block_bytes
        node, position = self.root, self._start_bytes
        if known_node is not None and known_node.parent is not None:
            node, position = known_node.parent, known_node.start_bytes
        packed_ids = [block_ids[: position // block_bytes * BLOCK_ID_BYTES]]
        while children := node.children:
            first_block = tokens[position : position + block_bytes]
            child = children.get(first_block)
            if child is None:
                child, shared = children.nearest(first_block)
                if shared == len(first_block):  # the run ends inside a longer block
                    return Insertion(child, len(tokens), b"".join(packed_ids), True, None, b"")
                if shared == len(child.tokens):  # a leaf of less than one block, which the run continues
                    return self._grow(child, tokens, position, block_ids, packed_ids)
                return self._attach(node, tokens, position, position + shared, block_ids, packed_ids, None)
            shared = shared_bytes(child.tokens, tokens, position)
            num_whole_blocks = shared // block_bytes
            if position + shared == len(tokens):
                packed_ids.append(child.block_ids[: num_whole_blocks * BLOCK_ID_BYTES])
                return Insertion(child, len(tokens), b"".join(packed_ids), True, None, b"")
            if shared < len(child.tokens):
                self._split(child, num_whole_blocks, tokens, position)
                upper = child.parent
                assert upper is not None
                packed_ids.append(upper.block_ids)
                boundary = position + num_whole_blocks * block_bytes
                return self._attach(upper, tokens, boundary, position + shared, block_ids, packed_ids, child)
            if child.is_leaf:
                return self._grow(child, tokens, position, block_ids, packed_ids)
            node = child
            position += shared
            packed_ids.append(child.block_ids)
        return self._attach(node, tokens, position, position, block_ids, packed_ids, None)

    def _attach(
        self,
        parent: Node,
        tokens: bytes,
        start: int,
        known_bytes: int,
        block_ids: bytes,
        packed_ids: list[bytes],
        split: Node | None,
    ) -> Insertion:
        """Add a node with `tokens[start:]` below `parent`; `start` is a block boundary."""
        first_id_byte = start // self._block_bytes * BLOCK_ID_BYTES
        node = Node(
            self.owner, parent, start, tokens[start:], block_ids[first_id_byte:], self._fingerprint(tokens, start)
        )
        if parent.children is None:
            parent.children = ChildTable()
        parent.children[tokens[start : start + self._block_bytes]] = node
        return Insertion(node, known_bytes, b"".join(packed_ids), False, split, b"")

    def _grow(self, leaf: Node, tokens: bytes, start: int, block_ids: bytes, packed_ids: list[bytes]) -> Insertion:
        """Grow a leaf that begins at `start` to the end of `tokens`, of which it holds a proper prefix."""
        known_bytes = start + len(leaf.tokens)
        num_whole_blocks = len(leaf.tokens) // self._block_bytes
        kept_ids = leaf.block_ids[: num_whole_blocks * BLOCK_ID_BYTES]
        replaced_ids = leaf.block_ids[num_whole_blocks * BLOCK_ID_BYTES :]
        old_key = leaf.tokens[: self._block_bytes]
        leaf.tokens = tokens[start:]
        leaf.set_block_ids(kept_ids + block_ids[start // self._block_bytes * BLOCK_ID_BYTES + len(kept_ids) :])
        if num_whole_blocks == 0:  # the leaf had less than one block, so its key (its first block) changes
            assert leaf.parent is not None
            siblings = leaf.parent.children
            assert siblings is not None
            del siblings[old_key]
            siblings[leaf.tokens[: self._block_bytes]] = leaf
            leaf.fingerprint = self._fingerprint(tokens, start)
        packed_ids.append(kept_ids)
        return Insertion(leaf, known_bytes, b"".join(packed_ids), False, None, replaced_ids)

    def cut(self, node: Node, num_blocks: int) -> Node:
        """Split a node after its first `num_blocks` blocks, at least one and fewer than it has. Returns the upper half.

        Complexity: O(depth + tokens of the path).
        """
        tokens = self.path_tokens(node)
        self._split(node, num_blocks, tokens, len(tokens) - len(node.tokens))
        upper = node.parent
        assert upper is not None
        return upper

    def _split(self, lower: Node, num_blocks: int, tokens: bytes, start: int) -> None:
        """Cut a node after its first `num_blocks` blocks, which `tokens` contains from byte `start` on.

        The new upper node takes the beginning; `lower` stays the same object and keeps its children, its pins and
        its position in the eviction queue.
        """
        cut_bytes = num_blocks * self._block_bytes
        parent = lower.parent
        assert parent is not None
        assert parent.children is not None
        packed = lower.block_ids[: num_blocks * BLOCK_ID_BYTES]
        upper = Node(self.owner, parent, lower.start_bytes, lower.tokens[:cut_bytes], packed, lower.fingerprint)
        upper.ref_count = int(lower.ref_count > 0)
        upper.held_ref_count = int(lower.held_ref_count > 0)
        upper.last_used_s = lower.last_used_s
        upper.awaits = lower.awaits
        upper.num_uses = lower.num_uses
        upper.policy_note = lower.policy_note
        parent.children[upper.tokens[: self._block_bytes]] = upper
        lower.parent = upper
        lower.start_bytes += cut_bytes
        lower.tokens = lower.tokens[cut_bytes:]
        lower.set_block_ids(lower.block_ids[num_blocks * BLOCK_ID_BYTES :])
        upper.children = ChildTable()
        upper.children[lower.tokens[: self._block_bytes]] = lower
        lower.fingerprint = prefix_fingerprint(self._seed, tokens, start + cut_bytes, lower.tokens[: self._block_bytes])

    def join(self, uppers: list[Node], lower: Node) -> None:
        """Join a node and the nodes before it into one node, the inverse of splits. The lowest object remains.

        Args:
            uppers: nodes that follow each other, the topmost first; each is the only child of the one before.
            lower: the only child of the last of them.

        Complexity: O(tokens of these nodes).
        """
        top = uppers[0]
        parent = top.parent
        assert parent is not None
        assert parent.children is not None
        lower.tokens = b"".join(node.tokens for node in (*uppers, lower))
        lower.set_block_ids(b"".join(node.block_ids for node in (*uppers, lower)))
        lower.start_bytes = top.start_bytes
        lower.fingerprint = top.fingerprint
        lower.parent = parent
        parent.children[lower.tokens[: self._block_bytes]] = lower
        for node in uppers:
            node.children = None  # otherwise only the garbage collector frees nodes that reference each other

    def remove(self, leaf: Node) -> None:
        """Remove a leaf. The caller becomes the owner of its blocks. Complexity: O(log siblings)."""
        parent = leaf.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[leaf.tokens[: self._block_bytes]]
        if not parent.children:
            parent.children = None

    def truncate(self, leaf: Node, num_blocks: int) -> bytes:
        """Shorten a leaf to its first `num_blocks` blocks, at least one and fewer than it has.

        Returns:
            The packed ids of the removed blocks, which the caller owns now.
        """
        removed = leaf.block_ids[num_blocks * BLOCK_ID_BYTES :]
        leaf.tokens = leaf.tokens[: num_blocks * self._block_bytes]
        leaf.set_block_ids(leaf.block_ids[: num_blocks * BLOCK_ID_BYTES])
        return removed

    def fingerprint_after(self, node: Node, num_blocks: int) -> int:
        """Hash the namespace and all tokens up to the end of the block that follows the first `num_blocks` of a node.

        Complexity: O(depth + tokens of the path).
        """
        tokens = self.path_tokens(node)
        return self._fingerprint(tokens, len(tokens) - len(node.tokens) + num_blocks * self._block_bytes)

    def _fingerprint(self, tokens: bytes, start: int) -> int:
        return prefix_fingerprint(self._seed, tokens, start + self._block_bytes)

    def path_tokens(self, node: Node) -> bytes:
        """Join all tokens from the root to the end of `node`. Complexity: O(depth + tokens)."""
        runs = [node.tokens]
        while (parent := node.parent) is not None:
            runs.append(parent.tokens)
            node = parent
        return b"".join(reversed(runs))

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents before children."""
        stack = list(self.root.children.values()) if self.root.children else []
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack.extend(node.children.values())
