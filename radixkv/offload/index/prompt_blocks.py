"""Blocks of a prompt, identified by their keys instead of their ids in the block pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from radixkv.namespace import Namespace


class KeyedBlock(NamedTuple):
    """A whole block of a prompt, with the key that it has in every tier.

    Attributes:
        key: key of the block.
        parent: key of the block before it, or of the namespace's root.
        tokens: the block's own tokens, little-endian uint32, without the marks of an invoked adapter (`Invocation`).
        namespace: the namespace that owns the block. If an invoked adapter computed the block, it names that adapter.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    namespace: Namespace


class BlockKeyFunction(Protocol):
    """A function that computes the keys of a prompt's blocks."""

    def __call__(self, namespace: Namespace, tokens: bytes, parent: bytes | None = None, /) -> Iterator[KeyedBlock]:
        """Yield the whole blocks of some tokens.

        Args:
            namespace: namespace of the prompt, without a public prefix.
            tokens: the prompt as the cache stores it, or the part of it that follows `parent`.
            parent: key of the block before these tokens; None at the start of the prompt.
        """


class StoredBlock(NamedTuple):
    """A block of a prompt that a tier holds.

    Attributes:
        block: its key and tokens.
        tier: name of the fastest tier that holds it; `remote` if it was fetched from another server.
        has_part: whether the tier also holds the block's part of windowed layers, as far as the index knows.
    """

    block: KeyedBlock
    tier: str
    has_part: bool = True


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class FetchedBlocks:
    """Consecutive blocks of a prompt, fetched from another server for one request and verified.

    Attributes:
        first_block: index of the first of them in the prompt.
        blocks: their keys and tokens.
        payloads: their bytes, in the layout of `BlockMover`.
    """

    first_block: int
    blocks: Sequence[KeyedBlock]
    payloads: Sequence[memoryview]
