"""A vertex of a radix tree, and the path that leads to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.blocks import BLOCK_ID_BYTES
from radixkv.cache.child_table import ChildTable

if TYPE_CHECKING:
    from radixkv.cache.radix_tree import RadixTree


class Node:
    """A run of tokens below its parent, and the blocks that hold their K/V.

    Attributes:
        tokens: little-endian uint32 token ids, at least one. Whole blocks, except in a leaf.
        block_ids: little-endian int32 block ids, `ceil(num_tokens / block_size)` of them.
        parent: None only for a root, which holds no tokens.
        children: by the bytes of their first block; None while there are none.
        tree: the tree this node belongs to.
        fingerprint: hash of the namespace and of all tokens up to the end of this node's first block.
        pin_count: leases whose path ends at or below this node.
        retired_block_ids: packed ids of blocks that were replaced here while leases could still use them; they are
            free when the pin count is 0 again.
        last_used_s: when a lease last began or ended here.
        num_uses: leases that found all of this node's tokens cached.
        priority: 0 to 100; unused leaves of lower priority are evicted first.
        expiry_entry: the node's place among those whose priority ends; None if it does not.
        has_expired: whether its priority has ended.
        num_retained_children: children that are retained; see `RetainedNodes`.
        policy_note: what the eviction policy wrote here; None on a new node. Both halves of a split have it.
        eviction_entry: the node's place in the eviction index, None while it is not evictable.
    """

    __slots__ = (
        "block_ids",
        "children",
        "eviction_entry",
        "expiry_entry",
        "fingerprint",
        "has_expired",
        "last_used_s",
        "num_retained_children",
        "num_uses",
        "parent",
        "pin_count",
        "policy_note",
        "priority",
        "retired_block_ids",
        "tokens",
        "tree",
    )

    def __init__(self, tree: RadixTree, parent: Node | None, tokens: bytes, block_ids: bytes, fingerprint: int) -> None:
        self.tree = tree
        self.parent = parent
        self.tokens = tokens
        self.block_ids = block_ids
        self.fingerprint = fingerprint
        self.children: ChildTable | None = None
        self.pin_count = 0
        self.retired_block_ids = b""
        self.last_used_s = 0.0
        self.num_uses = 0
        self.policy_note: Any = None
        self.eviction_entry: tuple[int, Any, int, Node] | None = None
        self.priority = DEFAULT_PRIORITY
        self.expiry_entry: tuple[float, int, Node] | None = None
        self.has_expired = False
        self.num_retained_children = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of this run."""
        return len(self.block_ids) // BLOCK_ID_BYTES

    @property
    def is_leaf(self) -> bool:
        """Whether nothing continues this run."""
        return not self.children


def path_to(node: Node | None) -> list[Node]:
    """The nodes from the root, which is not among them, down to this one. Complexity: O(depth)."""
    nodes = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
