"""A block of a prompt, as stores know it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from radixkv.namespace import Namespace


class KeyedBlock(NamedTuple):
    """A whole block of a prompt, and the key that it has in every store.

    Attributes:
        key: of the block.
        parent: key of the block before it, or of the namespace.
        tokens: the block's own, plain, little-endian uint32.
        namespace: who shares it; with the adapter that computed it, if that is an invoked one.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    namespace: Namespace


class KeyBlocks(Protocol):
    """A function that makes the keys of a prompt's blocks."""

    def __call__(self, namespace: Namespace, tokens: bytes, parent: bytes | None = None, /) -> Iterator[KeyedBlock]:
        """Yield the whole blocks of tokens as the cache knows them.

        Args:
            namespace: of the prompt, without a trunk.
            tokens: the prompt, or what follows some of its blocks.
            parent: key of the last one of these; None if there are none.
        """
