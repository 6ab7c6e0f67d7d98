"""Blocks that were fetched for one request from another server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.cache.elsewhere.keyed_block import KeyedBlock


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Fetched:
    """K and V of blocks of a prompt that follow each other, verified.

    Attributes:
        first_block: index of the first of them in the prompt.
        blocks: what they are.
        payloads: their bytes, as `BlockMover` writes them.
    """

    first_block: int
    blocks: Sequence[KeyedBlock]
    payloads: Sequence[memoryview]
