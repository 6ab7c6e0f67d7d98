"""A node of a radix tree, the path that leads to it, and the sessions that use nodes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedList

from radixkv.api.awaits import Awaits
from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.blocks import BLOCK_ID_BYTES
from radixkv.cache.tenants import TenantUsage
from radixkv.namespace import Namespace, PromptKey
from radixkv.tokens import shared_bytes

_V = TypeVar("_V")

_MAX_SCANNED_KEYS = 4  # most nodes have two children, and even an empty sorted list costs 2 us and 800 bytes


class ChildTable(dict[bytes, _V], Generic[_V]):
    """A dict that also finds the nearest key. Change it by `table[key] = child` and `del table[key]` only.

    A few keys are compared one by one; more than four are kept in sorted order as well.

    Example:
        >>> table = ChildTable()
        >>> table[b"aaaabbbb"], table[b"aaaacccc"] = "first", "second"  # two tokens each
        >>> table.nearest(b"aaaaccccdddd")
        ('second', 8)
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: _SortedKeys | None = None

    def __setitem__(self, first_block: bytes, child: _V) -> None:
        """Add or replace a child. Complexity: O(log n)."""
        if self._order is not None and first_block not in self:
            self._order.add(first_block)
        dict.__setitem__(self, first_block, child)
        if self._order is None and len(self) > _MAX_SCANNED_KEYS:
            self._order = _SortedKeys(self)

    def __delitem__(self, first_block: bytes) -> None:
        """Remove a child. Complexity: O(log n)."""
        dict.__delitem__(self, first_block)
        if self._order is not None:
            self._order.remove(first_block)

    def nearest(self, first_block: bytes) -> tuple[_V, int]:
        """Find the child whose key shares the most tokens with `first_block`, and the number of bytes shared.

        The table must not be empty. In sorted order the longest common prefix is always with a neighbor.

        Complexity: O(log n).
        """
        keys = self if self._order is None else self._order.neighbors(first_block)
        nearest_key, max_shared_bytes = b"", -1
        for key in keys:
            num_shared_bytes = shared_bytes(key, first_block, 0)
            if num_shared_bytes > max_shared_bytes:
                nearest_key, max_shared_bytes = key, num_shared_bytes
        return self[nearest_key], max_shared_bytes

    def neighbors(self, first_block: bytes) -> list[bytes]:
        """Return the keys next to `first_block` in sorted order, other than itself; all other keys if these are few.

        Complexity: O(log n).
        """
        if self._order is None:
            return [key for key in self if key != first_block]
        order = self._order
        before = order.irange(maximum=first_block, inclusive=(False, False), reverse=True)
        after = order.irange(minimum=first_block, inclusive=(False, False))
        return [*islice(before, 1), *islice(after, 1)]

    def is_in_order(self) -> bool:
        """Whether the sorted keys are the keys of the table. Complexity: O(n log n)."""
        return self._order is None or list(self._order) == sorted(self)


class _SortedKeys(SortedList):  # type: ignore[misc]  # has no annotations
    """Sorted keys that find the two neighbors of a key quickly.

    The public methods of `SortedList` would need two look-ups by position, and each insertion invalidates the position
    index. Among 100,000 keys that takes 3.3 us, and 5.2 us between insertions. Using the lists inside a `SortedList`
    takes 0.8 and 1.9 us.
    """

    def neighbors(self, key: bytes) -> tuple[bytes, bytes]:
        """Return the greatest key below `key` and the smallest key not below it; at either end the same key twice."""
        lists: list[list[bytes]] = self._lists
        list_index = bisect_left(self._maxes, key)
        if list_index == len(lists):
            return lists[-1][-1], lists[-1][-1]
        keys = lists[list_index]
        index = bisect_left(keys, key)
        if index:
            return keys[index - 1], keys[index]
        return lists[list_index - 1][-1] if list_index else keys[0], keys[0]


NO_NUMBER = -1


@dataclass(frozen=True, slots=True)
class Owner:
    """The values that all nodes of a tree have in common.

    Attributes:
        namespace: the namespace whose tokens these are.
        usage: the counters of its tenant.
        block_size: tokens per block.
    """

    namespace: Namespace
    usage: TenantUsage
    block_size: int


_USUAL_TOOL_WAIT_S = 10.0  # assumed before a session's first wait; the median of recorded coding agents is 16 s


class Session:
    """A conversation of one tenant.

    Attributes:
        tenant, session_id: its names. The tenant chooses the id.
        nodes: the nodes that only this session has used.
        num_leases: its open leases.
        last_used_s: when a lease of it last began or ended, apart from leases that only load blocks.
        awaits: what it has been waiting for since its last lease was closed.
        has_ended: whether the tenant has ended it.
        prompt: what was cached of the prompt of its last lease and of its generated tokens, to load it from the tiers
            before the next turn; None if it is not remembered.
        tool_wait_s: moving average of how long it waited for tools; None before its first wait ended.
        return_entry: entry among the sessions whose next turn is expected; None while no turn of it is expected.
    """

    __slots__ = (
        "awaits",
        "has_ended",
        "last_used_s",
        "nodes",
        "num_leases",
        "prompt",
        "return_entry",
        "session_id",
        "tenant",
        "tool_wait_s",
    )

    def __init__(self, tenant: str, session_id: str) -> None:
        self.tenant = tenant
        self.session_id = session_id
        self.nodes: set[Node] = set()
        self.num_leases = 0
        self.last_used_s = 0.0
        self.awaits = Awaits.UNKNOWN
        self.prompt: PromptKey | None = None
        self.tool_wait_s: float | None = None
        self.return_entry: tuple[float, int, Session] | None = None
        self.has_ended = False

    @property
    def usual_wait_s(self) -> float:
        """How long the session usually waits for a tool."""
        return _USUAL_TOOL_WAIT_S if self.tool_wait_s is None else self.tool_wait_s

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds until the session is expected to return, if it waits for a tool.

        A session that has waited longer than usual is expected to wait as long again.
        """
        waited_s = now_s - self.last_used_s
        return waited_s if waited_s > self.usual_wait_s else self.usual_wait_s - waited_s

    @property
    def num_blocks(self) -> int:
        """Blocks of the nodes that only this session has used. Complexity: O(nodes)."""
        return sum(node.num_blocks for node in self.nodes)

    @property
    def ends(self) -> list[Node]:
        """The nodes in which its prompts end, as far as no other session has used them. Complexity: O(nodes)."""
        return [node for node in self.nodes if not any(child in self.nodes for child in (node.children or {}).values())]


class Node:
    """A run of tokens below its parent, and the blocks that hold their K/V.

    Attributes:
        owner: namespace, counters and block size of the tree that this node belongs to.
        parent: the previous node; None only for a root, which holds no tokens, or those of a public prefix.
        start_bytes: length of all tokens before this node.
        tokens: little-endian uint32 token ids, at least one. Whole blocks, except in a leaf.
        block_ids: little-endian int32 block ids, `ceil(num_tokens / block_size)` of them. Changed by `set_block_ids`.
        num_blocks: the number of these blocks.
        fingerprint: hash of the namespace and of all tokens up to the end of this node's first block.
        children: the next nodes, by the bytes of their first block; None if there are none.
        ref_count: leases whose path ends in this node, plus children that are pinned. A node is pinned while this is
            above 0.
        held_ref_count: the same as `ref_count`, counting held leases only.
        num_reused_blocks: blocks at the beginning that count as reused, if probation is on; see `EvictionQueue`.
        num_probation_blocks: blocks of this node while it is in the eviction queue on probation; otherwise 0.
        retired_block_ids: packed ids of blocks that were replaced in this node, or purged with it, while leases could
            still use them; they are freed when the node is unpinned.
        last_used_s: when a lease of this node or below last began, published blocks or ended. Far above the end of that
            lease's path, the time is only updated when the first lease pins the node and when the last one unpins it.
        awaits: what the session of the last lease that ended here, or below, waits for. The end of a session
            (`NOTHING`) is not recorded in nodes that other sessions probably use too; see `Pins.unpin`. A split copies
            it to both halves.
        num_uses: leases that found all tokens of this node cached, except those whose path ends far below.
        policy_note: data of the eviction policy; None on a new node. A split copies it to both halves.
        eviction_entry: entry in the eviction queue; None while the node is not evictable.
        priority: 0 to 100; unused leaves of lower priority are evicted first.
        expiry_entry: entry among the priorities that expire; None if the priority does not expire.
        renew_s: seconds until the priority expires after a lease has found all tokens of this node; None if a lease
            does not change its expiry.
        has_expired: whether the priority was above the default and has expired.
        num_retained_children: children that `RetainedNodes` counts as retained.
        segment_number: its number in the `SegmentIndex`; `NO_NUMBER` outside.
        session: the session that is the only one to have used this node; None if there is no such session.
        keys: the keys under which stores keep the first blocks of this node, as far as they were computed; None if none
            was. See `NodeKeys`.
    """

    __slots__ = (
        "awaits",
        "block_ids",
        "children",
        "eviction_entry",
        "expiry_entry",
        "fingerprint",
        "has_expired",
        "held_ref_count",
        "keys",
        "last_used_s",
        "num_blocks",
        "num_probation_blocks",
        "num_retained_children",
        "num_reused_blocks",
        "num_uses",
        "owner",
        "parent",
        "policy_note",
        "priority",
        "ref_count",
        "renew_s",
        "retired_block_ids",
        "segment_number",
        "session",
        "start_bytes",
        "tokens",
    )

    def __init__(
        self, owner: Owner, parent: Node | None, start_bytes: int, tokens: bytes, block_ids: bytes, fingerprint: int
    ) -> None:
        self.owner = owner
        self.parent = parent
        self.start_bytes = start_bytes
        self.tokens = tokens
        self.set_block_ids(block_ids)
        self.fingerprint = fingerprint
        self.children: ChildTable[Node] | None = None
        self.ref_count = 0
        self.held_ref_count = 0
        self.retired_block_ids = b""
        self.last_used_s = 0.0
        self.awaits = Awaits.UNKNOWN
        self.num_uses = 0
        self.num_reused_blocks = 0
        self.num_probation_blocks = 0
        self.policy_note: Any = None
        self.eviction_entry: tuple[int, Any, int, int, Node] | None = None
        self.priority = DEFAULT_PRIORITY
        self.expiry_entry: tuple[float, int, Node] | None = None
        self.renew_s: float | None = None
        self.has_expired = False
        self.num_retained_children = 0
        self.segment_number = NO_NUMBER
        self.session: Session | None = None
        self.keys: list[bytes] | None = None

    def set_block_ids(self, block_ids: bytes) -> None:
        """Set the packed ids of the blocks, and with them `num_blocks`."""
        self.block_ids = block_ids
        self.num_blocks = len(block_ids) // BLOCK_ID_BYTES

    @property
    def is_leaf(self) -> bool:
        """Whether nothing continues this run."""
        return not self.children

    @property
    def is_evictable(self) -> bool:
        """Whether this is a leaf with blocks that no lease uses. Roots and purged nodes are not evictable."""
        return self.ref_count == 0 and not self.children and self.num_blocks > 0 and self.parent is not None


# Uses are recorded for this many nodes at the end of a path. Paths of real traffic have fewer than 20 nodes.
NUM_FOLLOWED_NODES = 24


def path_to(node: Node | None) -> list[Node]:
    """List the nodes from below the root down to `node`. Complexity: O(depth)."""
    nodes = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
