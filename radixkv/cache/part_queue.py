"""The parts of windowed layers that no running request needs, in the order of their eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from radixkv.blocks import BlockIds

# Level 5 is the middle of a prompt, level 4 its odd quarters, and so on to level 1, its odd 32nds; level 0 is the rest.
_NUM_LEVELS = 6
# In place of a level: parts where a request or a hit ended, and blocks that are not in the queue.
_ENDED = _NUM_LEVELS
_OUTSIDE = -1


class PartQueue:
    """Orders unpinned parts for eviction. *Passed* parts, which the window of a request left behind, are evicted first.

    A passed part is only useful to a prompt that diverges there, and prompts may diverge anywhere. Therefore windows
    are evicted evenly over a prompt: those that end at odd eighths of it before those at odd quarters, and the window
    in its middle last. Wherever a prompt diverges, it can continue from a remaining window shortly before.

        windows of a prompt   [   )[   )[   )[   )[   )[   )[   )[ end )
        level                   3    4    3    5    3    4    3            an age counts as age / 2 ** level

    Parts where a request or a hit ended are evicted when no passed parts are left, the one unpinned longest ago first.

    Args:
        num_blocks: blocks of the block pool.
        window_blocks: blocks of a window.

    Complexity: O(levels) for each part.

    >>> queue = PartQueue(num_blocks=20, window_blocks=2)
    >>> for block_id in range(8):
    ...     queue.add_passed(block_id, position=block_id, num_blocks=8)
    >>> queue.pop(), queue.pop(), queue.pop(), queue.num_passed
    (6, 0, 1, 5)
    """

    def __init__(self, num_blocks: int, window_blocks: int) -> None:
        self._window_blocks = window_blocks
        self._level_of = np.full(num_blocks, _OUTSIDE, dtype=np.int8)
        self._used_at = np.zeros(num_blocks, dtype=np.int64)  # by block: when a prompt with this block was last used
        self._levels: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(_NUM_LEVELS)]  # when queued, by block
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._now = 0  # the time of this queue: the number of passed parts that were added so far

    def __len__(self) -> int:
        return self.num_passed + len(self._ended)

    def __iter__(self) -> Iterator[int]:
        for level in self._levels:
            yield from level
        yield from self._ended

    @property
    def num_passed(self) -> int:
        """Parts that requests only passed."""
        return sum(map(len, self._levels))

    def add_end(self, block_id: int) -> None:
        """Add a part where a request or a hit ended. Complexity: O(1)."""
        self._level_of[block_id] = _ENDED
        self._ended[block_id] = None

    def add_passed(self, block_id: int, position: int, num_blocks: int) -> None:
        """Add a part that a request has passed.

        Args:
            block_id: its block.
            position: the position of the block in the prompt.
            num_blocks: blocks of the prompt.
        """
        self._put(block_id, _level(position // self._window_blocks, -(-num_blocks // self._window_blocks)))

    def move(self, old: int, new: int) -> None:
        """Replace a block by another one with the same content."""
        level = int(self._level_of[old])
        self.remove(old)
        if level == _ENDED:
            self.add_end(new)
        else:
            self._put(new, level)

    def remove(self, block_id: int) -> None:
        """Remove a part. Complexity: O(1)."""
        level = self._level_of[block_id]
        self._level_of[block_id] = _OUTSIDE
        del (self._ended if level == _ENDED else self._levels[level])[block_id]

    def touch(self, block_ids: BlockIds) -> None:
        """Record a use of a prompt with these blocks, whether or not it needed their parts."""
        self._used_at[block_ids] = self._now

    def pop(self) -> int | None:
        """Remove the part that is evicted next. Returns its block; None if there is none."""
        oldest, greatest_age = None, -1.0
        for level, queued in enumerate(self._levels):
            self._requeue_used(queued)
            for block_id, queued_at in queued.items():
                age = (self._now - queued_at) / 2**level
                if age > greatest_age:
                    oldest, greatest_age = block_id, age
                break  # the first part of a level is its oldest
        if oldest is None:
            oldest = next(iter(self._ended), None)
        if oldest is not None:
            self.remove(oldest)
        return oldest

    def _put(self, block_id: int, level: int) -> None:
        self._now += 1
        self._level_of[block_id] = level
        self._levels[level][block_id] = self._now

    def _requeue_used(self, queued: OrderedDict[int, int]) -> None:
        """Move parts at the front of a level to its end if they were used recently. Complexity: O(1), amortized."""
        while queued:
            block_id, queued_at = next(iter(queued.items()))
            used_at = int(self._used_at[block_id])
            if used_at <= queued_at:
                return
            queued[block_id] = used_at
            queued.move_to_end(block_id)


def _level(window: int, num_windows: int) -> int:
    """Return the level of a window. The window that ends in the middle of the prompt has the highest level."""
    end_window = window + 1
    for level in range(_NUM_LEVELS - 1, 0, -1):
        num_pieces = 2 ** (_NUM_LEVELS - level)
        piece = -(-end_window * num_pieces // max(1, num_windows))
        if piece < num_pieces and piece * num_windows // num_pieces == end_window:
            return level
    return 0
