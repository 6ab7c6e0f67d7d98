"""A slow and obvious model of retention, block by block, to check the cache against.

A block is known by its path: the numbers that the content oracle gives to the last token of each block from the root
on. Two blocks with one path can't be in a cache at the same time.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.api.retention import DEFAULT_PRIORITY, Grant


@dataclass(frozen=True)
class RetentionRequest:
    """A retention of published tokens and the time when it ends; `math.inf` for none."""

    start: int
    end: int
    priority: int
    expires_s: float
    only_raise: bool


class Retained(NamedTuple):
    path: tuple[int, ...]
    priority: int
    expires_s: float


class RetentionOracle:
    """Priorities by the last number of a block's path."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._kept: dict[int, Retained] = {}

    def path(self, identities: list[int]) -> tuple[int, ...]:
        """Return the last number of each block of a run."""
        block_size = self.block_size
        return tuple(identities[min(end, len(identities)) - 1] for end in self._ends(len(identities), block_size))

    @staticmethod
    def _ends(num_tokens: int, block_size: int) -> range:
        return range(block_size, num_tokens + block_size, block_size)

    def priority(self, block: int) -> int:
        return self._kept[block].priority if block in self._kept else DEFAULT_PRIORITY

    def retained(self) -> set[int]:
        """Return the blocks above the default priority, and all blocks before them."""
        return {block for kept in self._kept.values() if kept.priority > DEFAULT_PRIORITY for block in kept.path}

    def retain(self, identities: list[int], request: RetentionRequest) -> Grant:
        """Retain a published run as the cache should."""
        path = self.path(identities[: request.end])
        num_granted_blocks = first = request.start // self.block_size
        for index in range(first, len(path)):
            block, before = path[index], path[: index + 1]
            if request.only_raise and self._lasts_longer(block, request):
                num_granted_blocks += 1
                continue
            if request.priority > DEFAULT_PRIORITY and len(self.retained().union(before)) > self.max_blocks:
                break
            self._kept[block] = Retained(before, request.priority, request.expires_s)
            num_granted_blocks += 1
        num_tokens = max(0, min(request.end, num_granted_blocks * self.block_size) - request.start)
        return Grant(num_tokens, request.end - request.start - num_tokens, 0)

    def _lasts_longer(self, block: int, request: RetentionRequest) -> bool:
        kept = self._kept.get(block)
        if kept is None:
            return request.priority <= DEFAULT_PRIORITY
        return kept.priority > request.priority or (
            kept.priority == request.priority and kept.expires_s >= request.expires_s
        )

    def published(self, identities: list[int]) -> None:
        """Note a run as published. A partly filled block that it continues grows, so its last number changes."""
        for index, number in enumerate(identities):
            end = min((index // self.block_size + 1) * self.block_size, len(identities))
            if number in self._kept and index + 1 < end:
                kept = self._kept.pop(number)
                grown = identities[end - 1]
                self._kept[grown] = Retained((*kept.path[:-1], grown), kept.priority, kept.expires_s)

    def forget_all_but(self, published: Container[int]) -> None:
        self._kept = {block: kept for block, kept in self._kept.items() if block in published}

    def expire(self, now_s: float) -> int:
        """End the retentions whose time has come. Returns their number of blocks."""
        num_blocks = len(self._kept)
        self._kept = {block: kept for block, kept in self._kept.items() if kept.expires_s > now_s}
        return num_blocks - len(self._kept)
