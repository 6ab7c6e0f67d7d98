"""The interfaces of copies of blocks between the pool and host memory. Nothing here needs PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Copy(Protocol):
    """A copy that was started. Its host memory must not be reused before the copy is complete."""

    def is_complete(self) -> bool:
        """Whether the copy is complete. Does not wait."""

    def wait(self) -> None:
        """Block the calling thread until the copy is complete. Any thread may wait."""

    def seconds(self) -> float:
        """Return how long the copy took. The copy must be complete."""


class CompleteCopy:
    """A copy that is complete from the beginning, like all copies on a CPU.

    Args:
        seconds: how long it took.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def is_complete(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return immediately."""

    def seconds(self) -> float:
        """Return how long the copy took."""
        return self._seconds


class ReadBlocks(NamedTuple):
    """Copies of blocks in host memory.

    Attributes:
        payloads: the bytes of each block, which do not change after `copy` is complete.
        copy: the copy that fills them.
    """

    payloads: list[memoryview]
    copy: Copy


class BlockCopier(Protocol):
    """What the tiers require of a `BlockMover`."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block with its part of windowed layers."""

    def read(self, block_ids: Sequence[int], part_ids: Sequence[int | None] | None = None) -> ReadBlocks:
        """Copy blocks to host memory."""

    def has_part(self, payload: memoryview) -> bool:
        """Whether a payload of `read` has the part of its block."""

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        """Copy payloads from `read` into blocks, without the parts."""

    def write_parts(self, part_ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        """Copy the parts in payloads from `read` into parts of windowed layers."""
