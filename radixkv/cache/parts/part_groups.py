"""All groups of layers whose blocks have parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from radixkv.api.stats import PartStats
from radixkv.blocks import BlockIds
from radixkv.cache.parts.part_holder import PartHolder
from radixkv.cache.parts.part_pool import NO_PART, PartPool
from radixkv.cache.states.state_slots import StateSlots


class PartGroups:
    """The part pools of one cache. Without any it does nothing, and all layers are found by the ids of blocks.

    Args:
        pools: the pool of each group.
        states: snapshots of states, from one of which each request goes on; None for a model without states.

    Attributes:
        pools, states: as above.
    """

    def __init__(self, pools: Sequence[PartPool] = (), states: StateSlots | None = None) -> None:
        self.pools = tuple(pools)
        self.states = states
        self._num_shortened_hits = self._num_lost_tokens = 0
        self._all: tuple[PartPool | StateSlots, ...] = self.pools if states is None else (*self.pools, states)

    @property
    def num_reached_blocks(self) -> int:
        """Blocks before a token of which some may be within reach."""
        return max((-(-pool.reach.num_tokens // pool.block_size) + 1 for pool in self.pools), default=0)

    def longest(self, packed: bytes, num_tokens: int) -> int:
        """Find how much of a cached prompt can be reused.

        Args:
            packed: ids of the blocks of at least `num_tokens` tokens.
            num_tokens: tokens that are cached.

        Returns:
            The most tokens after which every group has what it needs.
        """
        if not self._all or not num_tokens:
            return num_tokens
        block_ids = np.frombuffer(packed, dtype=np.int32)
        before = -1
        while before != num_tokens:  # what suits one group may not suit another
            before = num_tokens
            for pool in self._all:
                num_tokens = pool.longest(block_ids, num_tokens)
        return num_tokens

    def note_hit(self, cached_tokens: int, reused_tokens: int) -> None:
        """Count a lease, given the tokens that are cached and those of them that it could reuse."""
        if self.pools and reused_tokens < cached_tokens:
            self._num_shortened_hits += 1
            self._num_lost_tokens += cached_tokens - reused_tokens

    def stats(self) -> PartStats | None:
        """Count the parts of all groups; None if there are none."""
        if not self.pools:
            return None
        return PartStats(
            free=sum(pool.num_free for pool in self.pools),
            needed=sum(pool.num_needed for pool in self.pools),
            kept=sum(pool.num_waiting for pool in self.pools),
            given_up=sum(pool.num_given_up for pool in self.pools),
            shortened_hits=self._num_shortened_hits,
            lost_tokens=self._num_lost_tokens,
        )

    def num_usable(self, block_ids: BlockIds, have_part: Sequence[bool], *, keeps_all: bool = False) -> int:
        """Count the blocks, of those that could be loaded, from whose end a request can go on.

        Args:
            block_ids: int32, the blocks before them.
            have_part: whether each of them has its part.
            keeps_all: whether everything is within the request's reach.
        """
        num_blocks, before = block_ids.size + len(have_part), -1
        while before != num_blocks:
            before = num_blocks
            for pool in self.pools:
                has_part = np.append(pool.table[block_ids] != NO_PART, np.array(have_part, dtype=np.bool_))[:num_blocks]
                if keeps_all:
                    num_blocks = num_blocks if has_part.all() else int(has_part.argmin())
                else:
                    num_blocks = pool.reach.longest(has_part, num_blocks * pool.block_size, pool.block_size)
                    num_blocks //= pool.block_size
        return max(0, num_blocks - block_ids.size)

    def open(
        self,
        block_ids: BlockIds,
        cached_tokens: int,
        num_tokens: int,
        *,
        keeps_all: bool = False,
        found_tokens: int = 0,
    ) -> tuple[PartHolder, ...]:
        """Reserve what a request may need, and keep what it found.

        Args:
            block_ids: int32, the blocks that hold the cached tokens.
            cached_tokens: tokens that are reused, as `longest` says.
            num_tokens: tokens that it will have at most.
            keeps_all: whether everything is within its reach, and stays when it is over.
            found_tokens: tokens that are cached, with or without the parts that it takes to go on after them.

        Returns:
            A holder for each group. The caller must close them.

        Raises:
            OutOfBlocks: other requests have reserved too many parts, or too many would outlive their requests. Nothing
                has changed.
        """
        numbers = [self._most(pool, num_tokens, keeps_all=keeps_all) for pool in self.pools]
        self.require_room(num_tokens, keeps_all=keeps_all)
        holders = []
        for pool, number in zip(self.pools, numbers, strict=True):
            pool.reserve(number)
            holders.append(PartHolder(pool, number, keeps_all=keeps_all))
            holders[-1].find(block_ids, cached_tokens)
            if found_tokens > cached_tokens:
                holders[-1].expect_others(found_tokens)
        return tuple(holders)

    def require_lasting_room(self, num_tokens: int) -> None:
        """Raise if all parts of `num_tokens` tokens may not stay when their request is over.

        Raises:
            OutOfBlocks: too many would outlive their requests.
        """
        for pool in self.pools:
            pool.require_lasting_room(self._most(pool, num_tokens, keeps_all=True))

    def require_room(self, num_tokens: int, *, keeps_all: bool = False) -> None:
        """Raise if a request of `num_tokens` tokens can't run now.

        Raises:
            OutOfBlocks: as `open` says.
        """
        for pool in self.pools:
            pool.require_room(self._most(pool, num_tokens, keeps_all=keeps_all), lasts=keeps_all)

    def exchange(self, holders: Iterable[PartHolder], old: BlockIds, new: BlockIds) -> None:
        """Let blocks of a tree stand for a request's own ones; see `PartHolder.exchange`."""
        for holder in holders:
            for one, other in zip(old.tolist(), new.tolist(), strict=True):
                holder.exchange(one, other)

    def freed(self, block_ids: BlockIds) -> None:
        """Take back the parts of blocks that nobody owns any more."""
        for pool in self._all:
            pool.freed(block_ids)

    def check(self, open_holders: Iterable[Sequence[PartHolder]], free_blocks: BlockIds) -> None:
        """Recount the parts of each group; see `PartPool.check`.

        Args:
            open_holders: the holders of each open lease that has some.
            free_blocks: blocks that nobody owns.
        """
        by_group = list(zip(*open_holders, strict=True)) or [()] * len(self.pools)
        for pool, holders in zip(self.pools, by_group, strict=True):
            needs = Counter(block_id for holder in holders for block_id in holder.needed)
            pool.check(needs, sum(holder.num_reserved for holder in holders), free_blocks)
        if self.states is not None:
            self.states.check(free_blocks)

    def _most(self, pool: PartPool, num_tokens: int, *, keeps_all: bool) -> int:
        if keeps_all:
            return -(-num_tokens // pool.block_size) + 1
        return pool.reach.most_blocks(num_tokens, pool.block_size)
