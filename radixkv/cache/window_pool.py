"""The pool of one group of windowed layers: which block has a part there, and which requests need it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.blocks import BlockIds
from radixkv.errors import InvariantViolation, OutOfBlocks, require_invariant


@dataclass(frozen=True, slots=True)
class Reach:
    """The tokens before a position whose K/V are needed to continue from there.

        tokens   [0 ............................ upto - num_tokens ........ upto)
        parts     not needed                       | needed to compute from `upto`

    Layers with a sliding window of `w` tokens need `w - 1` before the next one.

    Attributes:
        num_tokens: number of tokens before the next one, at least 1.
    """

    num_tokens: int

    @classmethod
    def of_window(cls, window: int) -> Reach:
        """Return the reach of layers whose queries see `window` tokens, their own included.

        A window of one token does not include earlier tokens, but the block that is being written is still needed.

        >>> Reach.of_window(512).first_token(600)
        89
        """
        return cls(max(1, window - 1))

    def first_token(self, upto: int) -> int:
        """Return the first token whose part is needed to continue from `upto`."""
        return max(0, upto - self.num_tokens)

    def longest(self, has_part: npt.NDArray[np.bool_], num_tokens: int, block_size: int) -> int:
        """Find the longest prefix of a prompt from whose end a request can continue.

        Args:
            has_part: bool `[ceil(num_tokens / block_size)]`, whether each block of the prompt has its part.
            num_tokens: tokens that are cached.
            block_size: tokens a block.

        Returns:
            `num_tokens` or fewer; 0 if there is no such prefix.

        Complexity: a pass over `has_part`, and O(1) for each run of blocks without a part.

        >>> Reach(num_tokens=3).longest(np.array([True, False, True, True]), num_tokens=15, block_size=4)
        15
        >>> Reach(num_tokens=5).longest(np.array([True, False, False, True]), num_tokens=15, block_size=4)
        4
        """
        end = has_part.size
        while end:
            missing = np.flatnonzero(~has_part[:end])
            start = int(missing[-1]) + 1 if missing.size else 0  # blocks [start, end) have theirs
            upto = min(end * block_size, num_tokens)
            if self.first_token(upto) >= start * block_size:
                return upto
            end = start - 1 if start else 0
        return 0

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the maximum number of parts that a request of `num_tokens` needs, without those of the tokens of a
        step.

        These are the parts in the window, which begins and ends inside a block; the part that is written next; and the
        part that is copied.
        """
        return min(-(-num_tokens // block_size), -(-self.num_tokens // block_size) + 2) + 1


NO_PART = -1  # in the table, which the device's tables are made of


class WindowPool:
    """Allocates parts of blocks for one group of windowed layers, and evicts parts that no request needs.

        blocks      0     1     2     3     4     5          ids of the block pool, as trees and leases use them
        table       3     -     0     -     -     1          the part of each, if it has one
        parts    [ of 2 | of 5 | free | of 0 ]               memory of these layers, for fewer tokens

    A part is pinned while it is in the window of a running request. Unpinned parts stay, because another prompt may
    continue there, until parts run out: first those are evicted that a request has passed, then those where a request
    ended or a hit was found; of both kinds the least recently used first.

              need                  let_go                     evicted, for another block
        free ──────▶ pinned ◀─────────────────▶ unpinned, in a queue ──────────────▶ pinned
             ◀──────────────────────────────────
                   freed, with its block

    Reservations prevent deadlocks: what all requests may need at once never exceeds the pool. Parts that outlive their
    request, those of held leases and public prefixes, take at most half of what one request does not need.

    Args:
        num_blocks: blocks of the block pool.
        num_parts: parts of this pool.
        block_size: tokens a block.
        reach: the rule of these layers.
        step_tokens: maximum number of tokens of a step, all requests together.

    Attributes:
        num_blocks, num_parts, block_size, reach: as above.
        table: int32 `[num_blocks]`, the part of each block; `NO_PART` where there is none. Read-only for callers.
        num_step_parts: parts that are set aside for the tokens of a step.
        num_reserved: parts that are reserved for requests, and for leases that outlive them.
        num_lasting: reserved parts that outlive their request.
        max_lasting: maximum of `num_lasting`.
        num_given_up: parts of cached blocks that were evicted so far.

    Raises:
        InvariantViolation: there are too few parts for a single request.
    """

    def __init__(self, num_blocks: int, num_parts: int, block_size: int, reach: Reach, step_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.num_parts = num_parts
        self.block_size = block_size
        self.reach = reach
        self.num_step_parts = -(-step_tokens // block_size)
        least = least_parts(reach, block_size, step_tokens)
        require_invariant("parts", num_parts >= least, f"expected at least {least}, got {num_parts}")
        self.table: npt.NDArray[np.int32] = np.full(num_blocks, NO_PART, dtype=np.int32)
        self.num_reserved = 0
        self.num_lasting = 0
        self.max_lasting = (num_parts - least) // 2
        self.num_given_up = 0
        self._free = list(range(num_parts - 1, -1, -1))
        self._needs: Counter[int] = Counter()  # requests that need the part of a block
        self._passed: dict[int, None] = {}  # blocks with an unpinned part, the least recently used first
        self._ended: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Parts without a block."""
        return len(self._free)

    @property
    def num_needed(self) -> int:
        """Parts that running requests need."""
        return len(self._needs)

    @property
    def num_waiting(self) -> int:
        """Parts of cached blocks that no running request needs."""
        return len(self._passed) + len(self._ended)

    def require_room(self, num_parts: int, *, lasts: bool = False) -> None:
        """Raise if a request may not reserve `num_parts` parts now.

        Args:
            num_parts: parts to reserve.
            lasts: whether they will outlive the request.

        Raises:
            OutOfBlocks: other requests have reserved too many.
        """
        if lasts:
            self.require_lasting_room(num_parts)
        room = self.num_parts - self.num_step_parts - self.num_reserved
        if num_parts > room:
            raise OutOfBlocks(
                f"parts of windowed layers: expected room for {num_parts} blocks more, got {max(0, room)} of "
                f"{self.num_parts}, since running requests and public prefixes may need {self.num_reserved} and a "
                f"step {self.num_step_parts}"
            )

    def require_lasting_room(self, num_parts: int) -> None:
        """Raise if `num_parts` parts may not outlive their request.

        Raises:
            OutOfBlocks: there would be too many.
        """
        if not self.may_last(num_parts):
            raise OutOfBlocks(
                f"parts of windowed layers: expected at most {self.max_lasting} that outlive their requests, got "
                f"{num_parts} in addition to {self.num_lasting}"
            )

    def may_last(self, num_parts: int) -> bool:
        """Whether `num_parts` more parts may outlive their request."""
        return self.num_lasting + num_parts <= self.max_lasting

    def reserve(self, num_parts: int) -> None:
        """Reserve parts for a request, or return reserved ones if negative. Call `require_room` before."""
        self.num_reserved += num_parts

    def longest(self, block_ids: BlockIds, num_tokens: int) -> int:
        """Find how much of a cached prompt can be reused; see `Reach.longest`.

        Args:
            block_ids: int32, the blocks of at least `num_tokens` tokens.
            num_tokens: tokens that are cached.
        """
        own = block_ids[: -(-num_tokens // self.block_size)]
        return self.reach.longest(self.table[own] != NO_PART, num_tokens, self.block_size)

    def part_of(self, block_id: int) -> int:
        """Return the part of a block; `NO_PART` if it has none."""
        return int(self.table[block_id])

    def need(self, block_ids: Iterable[int]) -> None:
        """Pin the parts of blocks for one more request; allocate parts for blocks that have none.

        Raises:
            InvariantViolation: other requests have pinned all parts, more than they have reserved.
        """
        for block_id in block_ids:
            if not self._needs[block_id]:
                if self.table[block_id] == NO_PART:
                    self.table[block_id] = self._take()
                else:
                    self._leave_line(block_id)
            self._needs[block_id] += 1

    def let_go(self, block_ids: Iterable[int], *, are_ends: bool) -> None:
        """Unpin the parts of blocks for one request.

        Args:
            block_ids: blocks whose parts the request had pinned.
            are_ends: whether a request ended or a hit was found there; otherwise the request has passed them.
        """
        line = self._ended if are_ends else self._passed
        for block_id in block_ids:
            self._needs[block_id] -= 1
            if not self._needs[block_id]:
                del self._needs[block_id]
                line[block_id] = None

    def exchange(self, old: int, new: int) -> bool:
        """Replace a block by another one with the same content, because a tree had it first.

        If only the old block has a part, the new block takes it over. Otherwise the part is freed with the old block.

        Args:
            old: a block that one request has, and will release.
            new: the block of the tree.

        Returns:
            Whether the request had pinned the part of the old block. Then it has pinned that of the new block now.
        """
        was_needed = old in self._needs
        if self.table[old] != NO_PART and self.table[new] == NO_PART:
            self.table[new], self.table[old] = self.table[old], NO_PART
            if was_needed:
                self._needs[new] = self._needs.pop(old)
            else:
                self._leave_line(old)
                self._passed[new] = None
        elif was_needed:
            self.need([new])
            self.let_go([old], are_ends=False)
        return was_needed

    def freed(self, block_ids: BlockIds) -> None:
        """Free the parts of blocks that are free now. Complexity: O(len), with a loop over those with parts.

        Raises:
            InvariantViolation: a request has pinned one of them.
        """
        for block_id in block_ids[self.table[block_ids] != NO_PART].tolist():
            if block_id in self._needs:
                raise InvariantViolation("windowed layers: a block was freed whose part is pinned")
            self._leave_line(block_id)
            self._free.append(int(self.table[block_id]))
            self.table[block_id] = NO_PART

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        line = self._passed or self._ended
        if not line:
            raise InvariantViolation(f"parts: expected one that no request needs, got {self.num_parts} needed ones")
        block_id = next(iter(line))
        del line[block_id]
        part = int(self.table[block_id])
        self.table[block_id] = NO_PART
        self.num_given_up += 1
        return part

    def _leave_line(self, block_id: int) -> None:
        if block_id in self._passed:
            del self._passed[block_id]
        else:
            del self._ended[block_id]

    def check(self, needs: Counter[int], num_reserved: int, free_blocks: BlockIds) -> None:
        """Compare everything with what the caller has counted.

        Args:
            needs: number of leases by block.
            num_reserved: parts that leases have reserved.
            free_blocks: blocks without an owner.

        Raises:
            InvariantViolation: the message names the inconsistency.
        """
        with_part = np.flatnonzero(self.table != NO_PART)
        parts = sorted([*self._free, *self.table[with_part].tolist()])
        require_invariant("parts", parts == list(range(self.num_parts)), "one is lost, or two blocks have one")
        require_invariant("parts", self._needs == needs, "the needed ones are not those of the holders")
        require_invariant("parts", min(self._needs.values(), default=1) > 0, "a block without leases counts as pinned")
        lines = [*self._passed, *self._ended]
        require_invariant("parts", len(set(lines)) == len(lines), "a block waits in two lines")
        owners = sorted([*self._needs, *lines])
        require_invariant("parts", owners == with_part.tolist(), "a part is neither needed nor in a line")
        require_invariant("parts", bool((self.table[free_blocks] == NO_PART).all()), "a free block has one")
        require_invariant("parts", self.num_reserved == num_reserved, "the reservations are not those of the holders")
        is_bounded = num_reserved + self.num_step_parts <= self.num_parts
        require_invariant("parts", is_bounded, "more are reserved than there are")


def least_parts(reach: Reach, block_size: int, step_tokens: int) -> int:
    """Return the number of parts with which a request of any length can run alone.

    >>> least_parts(Reach.of_window(512), block_size=64, step_tokens=2048)
    43
    """
    return reach.most_blocks(2**62, block_size) + -(-step_tokens // block_size)
