"""Which values all ranks of a model hold: a block is usable if every rank can load its part."""

from __future__ import annotations

from collections.abc import Collection

_RANK_BYTES = 2


def key_of_rank(key: bytes, rank: int) -> bytes:
    """Return the key of one rank's part of a block. Applied to this key and the same rank, it returns the block's key.

    Ranks of one model keep different bytes for the same tokens, and may share a store.
    """
    tail = int.from_bytes(key[-_RANK_BYTES:], "little") ^ rank
    return key[:-_RANK_BYTES] + tail.to_bytes(_RANK_BYTES, "little")


class RankIndex:
    """Keys of blocks by the ranks that hold them.

    >>> index = RankIndex([{b"one", b"two"}, {b"two"}])
    >>> index.holds(b"one"), index.holds(b"two")
    (False, True)

    Args:
        keys: the keys that each rank holds.
    """

    def __init__(self, keys: Collection[Collection[bytes]]) -> None:
        self._keys_by_rank = [set(each) for each in keys]

    def holds(self, key: bytes) -> bool:
        """Whether all ranks hold a block."""
        return bool(self._keys_by_rank) and all(key in each for each in self._keys_by_rank)

    def update(self, rank: int, added: Collection[bytes], removed: Collection[bytes]) -> None:
        """Record what one rank has stored and removed."""
        self._keys_by_rank[rank].update(added)
        self._keys_by_rank[rank].difference_update(removed)
