"""A listener that is told of the blocks that stores have."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.elsewhere.keyed_block import KeyedBlock
from radixkv.namespace import Namespace


class StoreListener:
    """Is told which blocks stores have. Each method does nothing; override those that matter.

    Attributes:
        is_on: whether it wants to be told; if so, what became of a save is looked at soon, also while nothing runs.
    """

    is_on = False

    def met(self, namespace: Namespace, tokens: bytes, start: int, blocks: Sequence[KeyedBlock]) -> None:
        """Consecutive blocks of a prompt are stored, or may be soon; only here it is told which tokens a key means.

        Args:
            namespace: of the prompt, without a trunk.
            tokens: the prompt as the cache knows it, up to the end of these blocks at least.
            start: the place of the first of them among the prompt's blocks.
            blocks: with their keys.
        """

    def stored(self, store: str, key: bytes) -> None:
        """A store has a block. It may be told again."""

    def removed(self, store: str, key: bytes) -> None:
        """A store does not have a block any more, or never got it; or, of a shared one, nobody knows."""
