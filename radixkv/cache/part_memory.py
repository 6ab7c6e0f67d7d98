"""The memory that blocks and the parts of windowed layers share, and the border between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartMemory:
    """One memory for the blocks of the other layers and the parts of windowed layers. The border between them moves.

        memory   [ blocks ........... | free | further parts | parts with memory of their own ]
                                      └ withheld blocks: as many as take the memory of the further parts

    Attributes:
        part_bytes: bytes of a part.
        block_bytes: bytes of a block of the other layers; 0 if all layers are windowed, so that blocks take no memory.
        num_dedicated_parts: parts that have memory of their own, enough for one request of any length.

    >>> memory = PartMemory(part_bytes=5, block_bytes=2, num_dedicated_parts=10)
    >>> memory.num_blocks(10), memory.num_blocks(13), memory.num_bytes(100)
    (0, 8, 250)
    """

    part_bytes: int
    block_bytes: int
    num_dedicated_parts: int

    def num_blocks(self, num_parts: int) -> int:
        """Return how many blocks take the memory of the parts beyond those with memory of their own, rounded up."""
        if not self.block_bytes or num_parts <= self.num_dedicated_parts:
            return 0
        return -(-(num_parts - self.num_dedicated_parts) * self.part_bytes // self.block_bytes)

    def num_bytes(self, num_blocks: int) -> int:
        """Return the total size if `num_blocks` blocks fit next to the parts that have memory of their own."""
        return num_blocks * self.block_bytes + self.num_dedicated_parts * self.part_bytes
