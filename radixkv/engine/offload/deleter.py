"""Deletes blocks from stores, again and again until the stores have answered."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from radixkv.cache.elsewhere.elsewhere import Elsewhere
from radixkv.storage.tiers.tier import Tier


class Deleter:
    """Tells stores what to delete. What a store could not be asked is asked again later, all of it in one call.

    Until then it holds blocks that nobody finds, and a next process would find them.

    Args:
        elsewhere: knows what stores have been given again.
        tiers: the stores, by name.
    """

    def __init__(self, elsewhere: Elsewhere, tiers: Mapping[str, Tier]) -> None:
        self._elsewhere = elsewhere
        self._tiers = tiers
        self._failed: queue.SimpleQueue[tuple[str, Sequence[bytes]]] = queue.SimpleQueue()

    def delete(self, name: str, keys: Sequence[bytes]) -> Future[int | None]:
        """Tell a store to delete blocks. Returns the number of those that it had, None if it could not be asked."""
        deleted = self._tiers[name].delete(keys)
        deleted.add_done_callback(partial(self._end, name, keys))
        return deleted

    @property
    def has_failed(self) -> bool:
        """Whether a store is to be asked again."""
        return not self._failed.empty()

    def retry(self) -> None:
        """Ask again what could not be asked. Complexity: O(keys of calls that failed since the last time)."""
        left: dict[str, dict[bytes, None]] = {}
        for _ in range(self._failed.qsize()):
            name, keys = self._failed.get()
            left.setdefault(name, {}).update((key, None) for key in keys if key not in self._elsewhere.shelves[name])
        for name, useless in left.items():
            if useless:
                self.delete(name, list(useless))

    def _end(self, name: str, keys: Sequence[bytes], deleted: Future[int | None]) -> None:
        """Note the end of a call, on a thread of the store."""
        if deleted.cancelled() or deleted.result() is None:
            self._failed.put((name, keys))
