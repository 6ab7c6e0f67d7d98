"""A block of a prompt that a store has."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.cache.elsewhere.keyed_block import KeyedBlock


class Found(NamedTuple):
    """A block that a prompt can have without computing it.

    Attributes:
        block: what it is.
        shelf: name of the fastest store that has it.
        has_part: whether it has its part there, as far as is known.
    """

    block: KeyedBlock
    shelf: str
    has_part: bool = True
