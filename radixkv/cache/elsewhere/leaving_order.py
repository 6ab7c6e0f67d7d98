"""The order in which keys of blocks go from a store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple


class Place(NamedTuple):
    """Place of a key among all keys of a store. The lowest goes first.

    Attributes:
        level: keys of a lower level go before those of a higher one.
        turn: within a level the lowest goes first. No two keys have the same.
        key: of the block.
    """

    level: int
    turn: int
    key: bytes


class LeavingOrder:
    """Keys by level and turn.

        level -1  [ a  b ]      level 50  [ c  d  e ]      level 90  [ f ]
                    goes first                                        goes last

    All methods are O(levels) at most.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[bytes, int]] = {}
        self._level_of: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[Place]:
        """Iterate from the key that goes first."""
        for level in sorted(self._levels):
            for key, turn in self._levels[level].items():
                yield Place(level, turn, key)

    @property
    def first(self) -> Place | None:
        """The key that goes first, if there is any."""
        if not self._levels:
            return None
        level = min(self._levels)
        key, turn = next(iter(self._levels[level].items()))
        return Place(level, turn, key)

    def level_of(self, key: bytes) -> int:
        """Return the level of a key that is there."""
        return self._level_of[key]

    def put_last(self, key: bytes, level: int, turn: int) -> None:
        """Put a key behind all others of a level. `turn` is higher than theirs."""
        self.remove(key)
        self._levels.setdefault(level, OrderedDict())[key] = turn
        self._level_of[key] = level

    def put_first(self, key: bytes, level: int, turn: int) -> None:
        """Put a key before all others of a level. `turn` is lower than theirs."""
        self.put_last(key, level, turn)
        self._levels[level].move_to_end(key, last=False)

    def remove(self, key: bytes) -> None:
        """Take a key out, if it is there."""
        level = self._level_of.pop(key, None)
        if level is None:
            return
        del self._levels[level][key]
        if not self._levels[level]:
            del self._levels[level]
