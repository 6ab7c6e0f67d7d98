"""A slow and obvious model of retention, block by block, to check the cache against.

A block has the number that the content oracle gives to the prefix which the last token of the block ends. The path of
a block is the numbers of all blocks from the root to this block. Two blocks with the same path cannot be in a cache at
the same time.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.api.retention import DEFAULT_PRIORITY, Grant


@dataclass(frozen=True)
class RetentionRequest:
    """A retention of the published tokens `[start, end)` until `expires_s`, which may be `math.inf`."""

    start: int
    end: int
    priority: int
    expires_s: float
    only_raise: bool


class Retained(NamedTuple):
    """The retention of one block."""

    path: tuple[int, ...]
    priority: int
    expires_s: float


class RetentionOracle:
    """The priorities of blocks, by the number of the block."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._retentions: dict[int, Retained] = {}

    def path(self, identities: list[int]) -> tuple[int, ...]:
        """Return the number of each block of a prompt, from the identities of its tokens."""
        block_size = self.block_size
        return tuple(identities[min(end, len(identities)) - 1] for end in self._ends(len(identities), block_size))

    @staticmethod
    def _ends(num_tokens: int, block_size: int) -> range:
        return range(block_size, num_tokens + block_size, block_size)

    def priority(self, block: int) -> int:
        return self._retentions[block].priority if block in self._retentions else DEFAULT_PRIORITY

    def retained(self) -> set[int]:
        """Return the blocks above the default priority, and all blocks before them."""
        blocks: set[int] = set()
        for retention in self._retentions.values():
            if retention.priority > DEFAULT_PRIORITY:
                blocks.update(retention.path)
        return blocks

    def retain(self, identities: list[int], request: RetentionRequest) -> Grant:
        """Retain published tokens as the cache should."""
        path = self.path(identities[: request.end])
        first_block = request.start // self.block_size
        end_block = first_block  # the blocks before this one are granted
        for index in range(first_block, len(path)):
            block, block_path = path[index], path[: index + 1]
            if not (request.only_raise and self._lasts_longer(block, request)):
                if request.priority > DEFAULT_PRIORITY and len(self.retained().union(block_path)) > self.max_blocks:
                    break
                self._retentions[block] = Retained(block_path, request.priority, request.expires_s)
            end_block += 1
        num_tokens = max(0, min(request.end, end_block * self.block_size) - request.start)
        return Grant(num_tokens, request.end - request.start - num_tokens, 0)

    def _lasts_longer(self, block: int, request: RetentionRequest) -> bool:
        """Return whether the present retention of a block is of a higher priority, or as high and lasts as long."""
        present = self._retentions.get(block)
        if present is None:
            return request.priority <= DEFAULT_PRIORITY
        return present.priority > request.priority or (
            present.priority == request.priority and present.expires_s >= request.expires_s
        )

    def record_published(self, identities: list[int]) -> None:
        """Record that a prompt is published. A partly filled block that it continues grows and gets another number."""
        for index, number in enumerate(identities):
            end = min((index // self.block_size + 1) * self.block_size, len(identities))
            if number in self._retentions and index + 1 < end:
                retention = self._retentions.pop(number)
                new_number = identities[end - 1]
                new_path = (*retention.path[:-1], new_number)
                self._retentions[new_number] = Retained(new_path, retention.priority, retention.expires_s)

    def forget_all_but(self, published: Container[int]) -> None:
        self._retentions = {block: each for block, each in self._retentions.items() if block in published}

    def expire(self, now_s: float) -> int:
        """End the retentions that have expired. Returns their number of blocks."""
        num_blocks = len(self._retentions)
        self._retentions = {block: each for block, each in self._retentions.items() if each.expires_s > now_s}
        return num_blocks - len(self._retentions)
