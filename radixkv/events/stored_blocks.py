"""The hashes of the event blocks that were reported as stored, by node of the trees."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from radixkv.api.events import HASH_BYTES, AllCleared, BlocksRemoved, BlocksStored, Event
from radixkv.cache.node import Node
from radixkv.events.block_identity import Identities, hash_blocks
from radixkv.tokens import TOKEN_BYTES

# Changes of nodes, distinguished by their lengths. They are plain tuples because they are created during a commit,
# where a named tuple costs 0.2 us more.
Stored = tuple[Node, bytes, Node | None, bytes]
"""A leaf that is new or was extended; all tokens of the leaf; its parent, or None if the leaf was extended; the tokens
before the leaf in the event block in which it begins."""
Split = tuple[Node, Node, bytes]
"""A node that was split, the new node above it, and the tokens of the new node."""
Shortened = tuple[Node, int]
"""A leaf, and the number of remaining tokens; 0 if it was removed."""
Purged = tuple[Node]
"""A node whose tree was purged."""


class MergedNodes(NamedTuple):
    """Consecutive nodes, the topmost first, and the node that they were merged into."""

    uppers: list[Node]
    lower: Node


Change = Stored | Split | Shortened | Purged | MergedNodes


class _Run:
    """The event blocks that end in one node.

    Attributes:
        before: packed hash of the last event block that ends before the node, or the root of its namespace.
        hashes: packed hashes of the event blocks that end in the node.
        phase: number of tokens of the event block in which the node begins that are before the node.
    """

    __slots__ = ("before", "hashes", "phase")

    def __init__(self, before: bytes, hashes: bytes, phase: int) -> None:
        self.before = before
        self.hashes = hashes
        self.phase = phase

    @property
    def end(self) -> bytes:
        """Packed hash of the last event block up to the node's end."""
        return self.hashes[-HASH_BYTES:] or self.before


class _Removal(NamedTuple):
    """Consecutively removed blocks of one namespace: the packed hashes of each run of them."""

    cache_salt: str
    hashes: list[bytes]


class StoredBlocks:
    """Turns changes of nodes into events, and stores the hashes that later changes need.

        node    [ tokens ........................ )       64 bytes of tokens and 8 bytes of hash per event block of 16
        run      #before [ # ][ # ][ # ][ # ][ #          the last one ends in a child

    A block belongs to the node in which it ends. Only siblings can have equal blocks, in the part of their first pool
    block that they have in common. Such copies are counted, so that a block is reported once as stored and once as
    removed.

    A change contains the state of a node at the time of the change, so that changes can be processed later, in order.

    Args:
        block_size: tokens per event block.
        pool_block_size: tokens per block of the pool.
        identities: published names of namespaces.

    Attributes:
        num_blocks: number of distinct stored blocks.
    """

    def __init__(self, block_size: int, pool_block_size: int, identities: Identities) -> None:
        self.num_blocks = 0
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._pool_block_size = pool_block_size
        self._identities = identities
        self._runs: dict[Node, _Run] = {}
        self._copies: dict[bytes, int] = {}  # of blocks that end inside the first pool block of a node

    def process(self, changes: deque[Change], max_blocks: int) -> tuple[Event, ...]:
        """Process changes from the front until about `max_blocks` blocks are hashed or no change is left.

        Each change counts as one more block. A change is always processed as a whole, and may exceed the maximum.

        Returns:
            The events.

        Complexity: O(added tokens + removed blocks).
        """
        events: list[BlocksStored | _Removal] = []
        is_purged = False
        while changes and max_blocks > 0:
            change = changes.popleft()
            max_blocks -= 1
            if isinstance(change, MergedNodes):
                self._merge(change)
            elif len(change) == 4:
                max_blocks -= self._store(change, events)
            elif len(change) == 3:
                self._split(change)
            elif len(change) == 2:
                self._shorten(*change, events)
            else:
                self._shorten(*change, 0, events)
                is_purged = True
        if is_purged and self.num_blocks == 0:
            return (AllCleared(),) if events else ()
        return tuple(
            BlocksRemoved(b"".join(each.hashes), each.cache_salt) if isinstance(each, _Removal) else each
            for each in events
        )

    def run_of(self, node: Node) -> tuple[bytes, bytes, int]:
        """Return the stored blocks of a node, which must have no pending changes.

        Returns:
            The packed hash before its event blocks, their packed hashes, and the number of leading blocks that siblings
            may have as well.
        """
        run = self._runs[node]
        return run.before, run.hashes, self._num_shareable(run.phase, len(run.hashes) // HASH_BYTES)

    def _num_shareable(self, phase: int, num_hashes: int) -> int:
        """Count the blocks of a run that siblings may have as well: those that end inside the first pool block."""
        first_end = self._block_size - phase
        if first_end >= self._pool_block_size:
            return 0
        return min(num_hashes, (self._pool_block_size - 1 - first_end) // self._block_size + 1)

    def _store(self, change: Stored, events: list[BlocksStored | _Removal]) -> int:
        """Hash the blocks that are complete now. Returns their number."""
        node, tokens, parent, tail = change
        run = self._runs.get(node)
        if run is None:
            parent_run = None if parent is None else self._runs.get(parent)
            before = self._identities.of(node.owner.namespace).root if parent_run is None else parent_run.end
            run = self._runs[node] = _Run(before, b"", len(tail) // TOKEN_BYTES)
        num_old = len(run.hashes) // HASH_BYTES
        # Where the first new block begins, in bytes from the beginning of the node; negative if before the node.
        start = num_old * self._block_bytes - run.phase * TOKEN_BYTES
        tokens = tail + tokens if start < 0 else tokens[start:]
        before = run.end
        new_hashes = hash_blocks(before, tokens, self._block_bytes)
        if not new_hashes:
            return 0
        run.hashes += new_hashes
        num_new = len(new_hashes) // HASH_BYTES
        num_copies = self._count_copies(new_hashes, self._num_shareable(run.phase, num_old + num_new) - num_old)
        if num_copies:
            before = new_hashes[(num_copies - 1) * HASH_BYTES : num_copies * HASH_BYTES]
            new_hashes = new_hashes[num_copies * HASH_BYTES :]
        if new_hashes:
            identity = self._identities.of(node.owner.namespace)
            parent_hash = None if before == identity.root else int.from_bytes(before, "little")
            new_tokens = tokens[num_copies * self._block_bytes : num_new * self._block_bytes]
            events.append(BlocksStored(parent_hash, new_hashes, new_tokens, self._block_size, identity.cache_salt))
            self.num_blocks += num_new - num_copies
        return num_new

    def _count_copies(self, hashes: bytes, num_shareable: int) -> int:
        """Count another copy of the first `num_shareable` blocks.

        Returns:
            How many of these blocks existed before. They precede the others, since siblings begin with equal tokens.
        """
        num_existing = 0
        for start in range(0, num_shareable * HASH_BYTES, HASH_BYTES):
            block = hashes[start : start + HASH_BYTES]
            copies = self._copies.get(block, 0)
            self._copies[block] = copies + 1
            num_existing += copies > 0
        return num_existing

    def _split(self, change: Split) -> None:
        """Split the blocks of a node. This causes no events."""
        lower_node, upper_node, upper_tokens = change
        lower = self._runs[lower_node]
        num_tokens = lower.phase + len(upper_tokens) // TOKEN_BYTES
        cut_bytes = num_tokens // self._block_size * HASH_BYTES
        upper = self._runs[upper_node] = _Run(lower.before, lower.hashes[:cut_bytes], lower.phase)
        lower.before = upper.end
        lower.hashes = lower.hashes[cut_bytes:]
        lower.phase = num_tokens % self._block_size
        self._count_copies(lower.hashes, self._num_shareable(lower.phase, len(lower.hashes) // HASH_BYTES))

    def _merge(self, change: MergedNodes) -> None:
        """Merge the blocks of nodes. This causes no events."""
        top = self._runs[change.uppers[0]]
        runs = [*(self._runs.pop(upper) for upper in change.uppers), self._runs[change.lower]]
        for run in runs[1:]:
            num_shareable = self._num_shareable(run.phase, len(run.hashes) // HASH_BYTES)
            for start in range(0, num_shareable * HASH_BYTES, HASH_BYTES):
                block = run.hashes[start : start + HASH_BYTES]
                del self._copies[block]  # the node has no siblings, so this is the only copy
        self._runs[change.lower] = _Run(top.before, b"".join(run.hashes for run in runs), top.phase)

    def _shorten(self, node: Node, num_kept_tokens: int, events: list[BlocksStored | _Removal]) -> None:
        """Remove the event blocks of a node that contain a removed token."""
        run = self._runs[node]
        num_hashes = len(run.hashes) // HASH_BYTES
        num_kept = (run.phase + num_kept_tokens) // self._block_size if num_kept_tokens else 0
        removed = run.hashes[num_kept * HASH_BYTES :]
        for start in range(num_kept * HASH_BYTES, self._num_shareable(run.phase, num_hashes) * HASH_BYTES, HASH_BYTES):
            block = run.hashes[start : start + HASH_BYTES]
            if self._copies[block] > 1:
                self._copies[block] -= 1
                removed = removed[HASH_BYTES:]  # blocks that siblings have as well precede the others
            else:
                del self._copies[block]
        if num_kept_tokens:
            run.hashes = run.hashes[: num_kept * HASH_BYTES]
        else:
            del self._runs[node]
        if removed:
            self.num_blocks -= len(removed) // HASH_BYTES
            cache_salt = self._identities.of(node.owner.namespace).cache_salt
            if events and isinstance(last := events[-1], _Removal) and last.cache_salt == cache_salt:
                last.hashes.append(removed)
            else:
                events.append(_Removal(cache_salt, [removed]))
