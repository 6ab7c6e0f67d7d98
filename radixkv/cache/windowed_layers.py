"""Windowed layers: the parts that each request needs of their pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from radixkv.api.stats import PartStats
from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.window_pool import NO_PART, WindowPool
from radixkv.errors import InvariantViolation
from radixkv.namespace import Namespace

_COPIED = -1  # in place of the position of a block that is only copied from


class Cover(NamedTuple):
    """The parts of blocks that one step of a request reads and writes.

    Attributes:
        part_ids: int32 `[ceil(end / block_size)]`, the part of each block that is in the window or written; entries of
            earlier blocks are 0 and have no meaning.
        copy: a copy of parts to make first; None if there is none.
    """

    part_ids: BlockIds
    copy: BlockCopy | None


class WindowLease:
    """Pins the parts that a request needs in one pool, until its lease is closed.

        cover    before a step: pins the parts in the window of its tokens, and those that it writes
        settle   after a step: unpins the parts that the next token does not need

    Args:
        pool: the pool of the group.
        num_reserved: maximum number of parts that the request needs, apart from those that a step writes. The caller
            reserves them.
        num_tokens: maximum number of tokens that the request will have.
        keeps_all: whether all parts are kept, as public prefixes need.

    Attributes:
        num_reserved: the argument, until the lease is closed.
        num_lasting: reserved parts that outlive the request.
    """

    __slots__ = (
        "_diverging",
        "_keeps_all",
        "_needed",
        "_num_blocks",
        "_num_found_blocks",
        "_pool",
        "num_lasting",
        "num_reserved",
    )

    def __init__(self, pool: WindowPool, num_reserved: int, num_tokens: int = 0, *, keeps_all: bool = False) -> None:
        self._pool = pool
        self._num_blocks = -(-num_tokens // pool.block_size)
        self._keeps_all = keeps_all
        self._needed: dict[int, int] = {}  # by block id: its position in the prompt, in blocks
        self._num_found_blocks = 0
        self._diverging = range(0)  # blocks at which another prompt diverged, although this request continues
        self.num_reserved = num_reserved
        self.num_lasting = 0

    @property
    def needed(self) -> list[int]:
        """Ids of the blocks whose parts are needed."""
        return list(self._needed)

    def part_of(self, block_id: int) -> int:
        """Return the part of a block that is needed."""
        return self._pool.part_of(block_id)

    def pin_hit(self, block_ids: BlockIds, cached_tokens: int) -> None:
        """Pin the parts that are needed to continue after the cached tokens.

        Args:
            block_ids: int32, the blocks that hold the cached tokens.
            cached_tokens: tokens that are reused, as returned by `WindowPool.num_reusable_tokens`.
        """
        first, end = self._first_block(cached_tokens), -(-cached_tokens // self._pool.block_size)
        self._num_found_blocks = end
        self._set_pinned(dict(zip(block_ids[first:end].tolist(), range(first, end), strict=True)), end)

    def note_divergence(self, upto: int) -> None:
        """Keep the parts needed to continue after `upto` tokens for as long as the parts at the end of a request.

        Another prompt has the same tokens up to there, so a third prompt may continue there as well.
        """
        self._diverging = range(self._first_block(upto), -(-upto // self._pool.block_size))

    def cover(self, block_ids: BlockIds, start: int, end: int, copy: BlockCopy | None = None) -> Cover:
        """Pin the parts that a step reads, and allocate parts for the blocks that it writes.

        Args:
            block_ids: int32, the blocks of at least `end` tokens.
            start, end: the step computes the tokens `[start, end)`. Earlier tokens are already computed.
            copy: a copy of a block that is made first: its target holds the token before `start`.

        Raises:
            InvariantViolation: a part is missing that should have been kept.
        """
        size = self._pool.block_size
        first, last = self._first_block(start), -(-end // size)
        to_pin = dict(zip(block_ids[first:last].tolist(), range(first, last), strict=True))
        num_written_blocks = -(-start // size)
        if copy is not None:
            to_pin[copy.source] = _COPIED
            num_written_blocks -= 1
        self._set_pinned(to_pin, num_written_blocks)
        table = self._pool.table
        part_ids = np.zeros(last, dtype=np.int32)
        part_ids[first:] = table[block_ids[first:last]]
        part_copy = None if copy is None else BlockCopy(int(table[copy.source]), int(table[copy.target]))
        return Cover(part_ids, part_copy)

    def receive(self, block_ids: BlockIds, num_blocks: int) -> list[int]:
        """Pin what is needed to continue after loaded blocks, and allocate parts for those that have none.

        Args:
            block_ids: int32, the blocks of the prompt.
            num_blocks: blocks at the beginning that are computed or loaded, as returned by `WindowedLayers.num_usable`.

        Returns:
            The positions of the blocks that got a part, which the caller has to fill.
        """
        first = self._first_block(num_blocks * self._pool.block_size)
        to_pin = dict(zip(block_ids[first:num_blocks].tolist(), range(first, num_blocks), strict=True))
        without_part = {
            block_id: position for block_id, position in to_pin.items() if self._pool.table[block_id] == NO_PART
        }
        self._set_pinned(
            {block_id: position for block_id, position in to_pin.items() if block_id not in without_part}, num_blocks
        )
        self._pool.pin(without_part)  # last, so that this evicts none of the parts that are needed
        self._needed.update(without_part)
        self._num_found_blocks = num_blocks
        return list(without_part.values())

    def settle(self, upto: int, copy: BlockCopy | None = None) -> None:
        """Pin only the parts needed to continue after the computed tokens, or to compute the last of them again.

        Therefore the same prompt can later be reused up to its last token, which is always computed.

        Args:
            upto: tokens that are computed.
            copy: a pending block copy.
        """
        first, end = self._first_block(upto - 1), -(-upto // self._pool.block_size)
        source = None if copy is None else copy.source
        needed = self._needed
        dropped = [
            block_id
            for block_id, position in needed.items()
            if not first <= position < end and (position != _COPIED or block_id != source)
        ]
        self._unpin(dropped)

    def exchange(self, old: int, new: int) -> None:
        """Replace a block of the request by a block of the tree; see `WindowPool.exchange`."""
        if self._pool.exchange(old, new):
            self._needed[new] = self._needed.pop(old)

    def keep(self) -> bool:
        """Keep the pinned parts until `close`, although the request has ended.

        Returns:
            Whether there is room for that. If not, everything is unpinned.
        """
        num_parts = len(self._needed)
        if not self._pool.may_last(num_parts):
            self.close()
            return False
        self._pool.reserve(num_parts - self.num_reserved)
        self._pool.num_lasting += num_parts
        self.num_reserved = self.num_lasting = num_parts
        return True

    def close(self) -> None:
        """Unpin everything, and return the reservation. Closing again does nothing."""
        self._pool.unpin_ends(self._needed)
        self._pool.reserve(-self.num_reserved)
        self._pool.num_lasting -= self.num_lasting
        self._needed = {}
        self.num_reserved = 0
        self.num_lasting = 0

    def _first_block(self, upto: int) -> int:
        return 0 if self._keeps_all else self._pool.reach.first_token(upto) // self._pool.block_size

    def _set_pinned(self, to_pin: dict[int, int], num_written_blocks: int) -> None:
        """Pin the parts of exactly these blocks. Those before `num_written_blocks` must have one."""
        needed, table = self._needed, self._pool.table
        newly_needed = {block_id: position for block_id, position in to_pin.items() if block_id not in needed}
        if any(
            position < num_written_blocks and table[block_id] == NO_PART for block_id, position in newly_needed.items()
        ):
            raise InvariantViolation("windowed layers: expected each block in the window to have its part, got none")
        self._unpin([block_id for block_id in needed if block_id not in to_pin])  # first, so that there are enough
        self._pool.pin(newly_needed)
        needed.update(to_pin)

    def _unpin(self, block_ids: list[int]) -> None:
        ends: list[int] = []
        passed: dict[int, int] = {}
        for block_id in block_ids:
            position = self._needed.pop(block_id)
            if position < self._num_found_blocks or position in self._diverging:
                ends.append(block_id)
            else:
                passed[block_id] = position
        self._pool.unpin_ends(ends)
        self._pool.unpin_passed(passed, self._num_blocks)


class WindowedLayers:
    """The pools of all groups of windowed layers. A model without windowed layers has no pools.

    Args:
        pools: the pool of each group.

    Attributes:
        pools: the argument.
        shares_memory: whether parts and blocks share one memory.
    """

    def __init__(self, pools: Sequence[WindowPool] = ()) -> None:
        self.pools = tuple(pools)
        self.shares_memory = any(pool.share is not None for pool in self.pools)
        self._num_shortened_hits = 0
        self._num_lost_tokens = 0

    @property
    def num_reached_blocks(self) -> int:
        """Maximum number of blocks before a token that are at least partly in its window."""
        return max((-(-pool.reach.num_tokens // pool.block_size) + 1 for pool in self.pools), default=0)

    def num_reusable_tokens(self, packed: bytes, num_tokens: int) -> int:
        """Find how much of a cached prompt can be reused.

        Args:
            packed: ids of the blocks of at least `num_tokens` tokens.
            num_tokens: tokens that are cached.

        Returns:
            The length of the longest prefix after which every group has the parts that it needs.
        """
        if not self.pools or not num_tokens:
            return num_tokens
        block_ids = np.frombuffer(packed, dtype=np.int32)
        previous_num_tokens = -1
        while previous_num_tokens != num_tokens:  # a shorter prefix for one group may lack parts of another group
            previous_num_tokens = num_tokens
            for pool in self.pools:
                num_tokens = pool.num_reusable_tokens(block_ids, num_tokens)
        return num_tokens

    def connect(self, blocks: BlockPool) -> None:
        """Let all groups share the memory of blocks; see `WindowPool.connect`."""
        for pool in self.pools:
            pool.connect(blocks)

    @property
    def num_withheld_blocks(self) -> int:
        """Blocks whose memory is used by parts, or reserved for them."""
        return sum(pool.num_withheld_blocks for pool in self.pools)

    @property
    def num_returnable_blocks(self) -> int:
        """Blocks that would become available if all parts that no request has reserved were evicted."""
        return sum(pool.num_withheld_blocks - pool.num_reserved_blocks() for pool in self.pools)

    @property
    def has_excess(self) -> bool:
        """Whether parts are to be evicted before blocks are."""
        return any(pool.has_excess for pool in self.pools)

    def num_blocks_to_reserve(self, num_tokens: int, *, keeps_all: bool = False) -> int:
        """Return how many blocks the reservations of one more request would withhold; see `pin` and `reserve`."""
        nums_parts = [self._max_parts(pool, num_tokens, keeps_all=keeps_all) for pool in self.pools]
        return sum(
            pool.num_reserved_blocks(num_parts) - pool.num_reserved_blocks()
            for pool, num_parts in zip(self.pools, nums_parts, strict=True)
        )

    def num_unreserved_blocks(self, window_leases: Sequence[WindowLease]) -> int:
        """Return how many free blocks `reserve` would withhold. There is one window lease per group, or none."""
        return sum(
            max(0, pool.num_reserved_blocks(window_lease.num_reserved) - pool.num_withheld_blocks)
            for pool, window_lease in zip(self.pools, window_leases, strict=False)
        )

    def num_lacking_blocks(self, num_new_blocks: int, num_free_blocks: int) -> int:
        """Return how many blocks to evict for the parts of new blocks; see `WindowPool.num_lacking_blocks`."""
        return max(pool.num_lacking_blocks(num_new_blocks, num_free_blocks) for pool in self.pools)

    def num_blocks_to_evict(self, num_blocks: int) -> int:
        """Return how many blocks to evict to free the memory of `num_blocks`; their parts are evicted with them."""
        return max(1, int(num_blocks / (1 + sum(pool.blocks_per_part for pool in self.pools))))

    def evict_part(self, *, only_excess: bool) -> bool:
        """Evict a part, so that blocks can use its memory.

        Args:
            only_excess: only evict from groups that exceed their share.

        Returns:
            Whether a part was evicted.
        """
        return any(pool.evict_part() for pool in self.pools if pool.has_excess or not only_excess)

    def record_lookup(
        self, namespace: Namespace, tokens: bytes, packed: bytes, found_tokens: int, reusable_tokens: int
    ) -> None:
        """Record how much of a prompt is cached, and how much of that cannot be reused.

        Args:
            namespace, tokens: the prompt.
            packed: ids of the blocks of at least `found_tokens` tokens.
            found_tokens: tokens that are cached, with or without the parts that are needed to continue after them.
            reusable_tokens: the tokens that can be reused.
        """
        lost_tokens = found_tokens - reusable_tokens
        if lost_tokens:
            self._num_shortened_hits += 1
            self._num_lost_tokens += lost_tokens
        for pool in self.pools:
            pool.touch(np.frombuffer(packed, dtype=np.int32)[: -(-found_tokens // pool.block_size)])
            if pool.share is None:
                continue
            if lost_tokens:
                pool.share.record_missed_parts(lost_tokens, pool.num_passed)
            else:
                pool.share.record_missed_blocks(namespace, tokens, found_tokens)

    def stats(self) -> PartStats | None:
        """Count the parts of all groups; None if there are none."""
        if not self.pools:
            return None
        return PartStats(
            free=sum(pool.num_free for pool in self.pools),
            needed=sum(pool.num_pinned for pool in self.pools),
            kept=sum(pool.num_unpinned for pool in self.pools),
            given_up=sum(pool.num_evicted for pool in self.pools),
            shortened_hits=self._num_shortened_hits,
            lost_tokens=self._num_lost_tokens,
        )

    def num_usable(self, block_ids: BlockIds, loadable_have_part: Sequence[bool], *, keeps_all: bool = False) -> int:
        """Count the blocks that are worth loading: up to the last one from whose end a request can continue.

        Args:
            block_ids: int32, the blocks before those that could be loaded.
            loadable_have_part: whether each block that could be loaded has its part.
            keeps_all: whether all parts are needed.
        """
        num_blocks, previous_num_blocks = block_ids.size + len(loadable_have_part), -1
        while previous_num_blocks != num_blocks:
            previous_num_blocks = num_blocks
            for pool in self.pools:
                has_part = np.append(pool.table[block_ids] != NO_PART, np.array(loadable_have_part, dtype=np.bool_))
                has_part = has_part[:num_blocks]
                if keeps_all:
                    num_blocks = num_blocks if has_part.all() else int(has_part.argmin())
                else:
                    num_blocks = pool.reach.num_reusable_tokens(has_part, num_blocks * pool.block_size, pool.block_size)
                    num_blocks //= pool.block_size
        return max(0, num_blocks - block_ids.size)

    def pin(
        self,
        block_ids: BlockIds,
        cached_tokens: int,
        num_tokens: int,
        *,
        keeps_all: bool = False,
        found_tokens: int = 0,
    ) -> tuple[WindowLease, ...]:
        """Pin the parts that a request needs to continue after its cached tokens.

        Args:
            block_ids: int32, the blocks that hold the cached tokens.
            cached_tokens: tokens that are reused, as returned by `num_reusable_tokens`.
            num_tokens: maximum number of tokens that the request will have.
            keeps_all: whether all its parts are kept, even after its end.
            found_tokens: tokens that are cached, with or without the parts that are needed to continue after them.

        Returns:
            A lease for each group. The caller must call `reserve` before a step, and close them.

        Raises:
            OutOfBlocks: other requests have reserved too many parts, or too many would outlive their requests. Nothing
                has changed.
        """
        self.require_room(num_tokens, keeps_all=keeps_all)
        window_leases = []
        for pool in self.pools:
            num_parts = self._max_parts(pool, num_tokens, keeps_all=keeps_all)
            window_leases.append(WindowLease(pool, num_parts, num_tokens, keeps_all=keeps_all))
            window_leases[-1].pin_hit(block_ids, cached_tokens)
            if found_tokens > cached_tokens:
                window_leases[-1].note_divergence(found_tokens)
        return tuple(window_leases)

    def reserve(self, window_leases: Iterable[WindowLease]) -> None:
        """Reserve the parts that a request may need. `num_unreserved_blocks` blocks must be free for that."""
        for pool, window_lease in zip(self.pools, window_leases, strict=True):
            pool.reserve(window_lease.num_reserved)

    def require_lasting_room(self, num_tokens: int) -> None:
        """Raise if the parts of `num_tokens` tokens cannot be kept after their request.

        Raises:
            OutOfBlocks: too many would outlive their requests.
        """
        for pool in self.pools:
            pool.require_lasting_room(self._max_parts(pool, num_tokens, keeps_all=True))

    def require_room(self, num_tokens: int, *, keeps_all: bool = False) -> None:
        """Raise if `pin` would raise for a request of `num_tokens` tokens.

        Raises:
            OutOfBlocks: other requests have reserved too many parts, or too many would outlive their requests.
        """
        for pool in self.pools:
            pool.require_room(self._max_parts(pool, num_tokens, keeps_all=keeps_all), lasts=keeps_all)

    def exchange(self, window_leases: Iterable[WindowLease], old: BlockIds, new: BlockIds) -> None:
        """Replace blocks of a request by blocks of the tree; see `WindowLease.exchange`."""
        for window_lease in window_leases:
            for old_id, new_id in zip(old.tolist(), new.tolist(), strict=True):
                window_lease.exchange(old_id, new_id)

    def free_parts(self, block_ids: BlockIds) -> None:
        """Free the parts of blocks that are free now."""
        for pool in self.pools:
            pool.free_parts(block_ids)

    def check(self, open_window_leases: Iterable[Sequence[WindowLease]], free_blocks: BlockIds) -> None:
        """Recount the parts of each group; see `WindowPool.check`.

        Args:
            open_window_leases: the window leases of each open lease that has some.
            free_blocks: blocks without an owner.
        """
        by_group = list(zip(*open_window_leases, strict=True)) or [()] * len(self.pools)
        for pool, window_leases in zip(self.pools, by_group, strict=True):
            needs = Counter(block_id for window_lease in window_leases for block_id in window_lease.needed)
            pool.check(needs, sum(window_lease.num_reserved for window_lease in window_leases), free_blocks)

    def _max_parts(self, pool: WindowPool, num_tokens: int, *, keeps_all: bool) -> int:
        if keeps_all:
            return -(-num_tokens // pool.block_size) + 1
        return pool.reach.max_parts(num_tokens, pool.block_size)
