"""The simulated cache of a replica, in a fleet whose routing decisions are timed."""

from __future__ import annotations

from collections.abc import Sequence


class ReplicaBlocks:
    """The hashes of the cached blocks of conversations, without the common system prompt, which is never evicted.

    Blocks are evicted as in a cache: the least recently used conversation first, from its end.
    """

    def __init__(self) -> None:
        self._hashes: dict[int, list[int]] = {}  # by conversation; the least recently used conversation comes first

    @property
    def conversations(self) -> list[int]:
        """The conversations with at least one cached block."""
        return list(self._hashes)

    def hold(self, conversation: int, hashes: Sequence[int]) -> list[int]:
        """Use a conversation. Afterwards all its blocks are cached.

        Args:
            conversation: its number.
            hashes: the hashes of its blocks; those that are cached already come first.

        Returns:
            The hashes of the new blocks.
        """
        cached = self._hashes.pop(conversation, [])
        self._hashes[conversation] = list(hashes)
        return list(hashes[len(cached) :])

    def evict(self, num_blocks: int) -> list[int]:
        """Evict up to this many blocks, but none of the most recently used conversation. Returns their hashes."""
        evicted: list[int] = []
        while len(evicted) < num_blocks and len(self._hashes) > 1:
            conversation, hashes = next(iter(self._hashes.items()))
            num_kept = max(0, len(hashes) - (num_blocks - len(evicted)))
            evicted += reversed(hashes[num_kept:])
            del hashes[num_kept:]
            if not hashes:
                del self._hashes[conversation]
        return evicted
