"""A block of a prompt, as stores know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

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


# Yields the whole blocks of a prompt, whose tokens are as the cache knows them.
KeyBlocks = Callable[[Namespace, bytes], Iterator[KeyedBlock]]
