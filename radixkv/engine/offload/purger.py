"""Purges shared stores, again and again until they have answered."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from radixkv.cache.elsewhere.keyed_block import KeyedBlock
from radixkv.namespace import Namespace
from radixkv.storage.tiers.block_key import BlockKeys
from radixkv.storage.tiers.tier import Tier


class _Purge(NamedTuple):
    """A purge of one store: its name, and the names of the namespaces, None for any."""

    store: str
    tenant: str | None
    adapter: str | None
    salt: str | None


class Purger:
    """Tells shared stores which namespaces to forget, also what other servers stored of them.

    Until a store has answered, nothing of these namespaces is loaded from it: what is to be forgotten may still be
    there. A store that can't be asked is asked again later.

    Args:
        tiers: the shared stores, by name.
        keys: of the blocks.
        wake: called on a store's thread when it could not be asked, so that `retry` is called.
    """

    def __init__(self, tiers: Mapping[str, Tier], keys: BlockKeys, wake: Callable[[], None] = lambda: None) -> None:
        self._tiers = tiers
        self._keys = keys
        self._wake = wake
        self._open: dict[_Purge, int] = {}  # calls that have not ended
        self._failed: set[_Purge] = set()
        self._ended: queue.SimpleQueue[tuple[_Purge, bool]] = queue.SimpleQueue()

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> dict[str, Future[int | None]]:
        """Tell each store. Returns the number of blocks that it had, None if it could not be asked."""
        return {store: self._start(_Purge(store, tenant, adapter, salt)) for store in self._tiers}

    @property
    def has_failed(self) -> bool:
        """Whether a store is to be asked again."""
        self._note_ended()
        return bool(self._failed)

    def is_purging(self, store: str, namespace: Namespace) -> bool:
        """Whether a store may still hold what is to be forgotten of a namespace. Complexity: O(open purges)."""
        self._note_ended()
        return any(
            each.store == store and namespace.is_among(each.tenant, each.adapter, each.salt)
            for each in (*self._open, *self._failed)
        )

    def is_purging_any(self, store: str, blocks: Iterable[KeyedBlock]) -> bool:
        """Whether a store may still hold what is to be forgotten of any owner of blocks.

        A prompt that invokes an adapter has two: the base model's blocks have another one than the adapter's.
        """
        return any(self.is_purging(store, owner) for owner in {block.namespace for block in blocks})

    def retry(self) -> None:
        """Ask again what could not be asked."""
        self._note_ended()
        failed, self._failed = self._failed, set()
        for each in failed:
            self._start(each)

    def _start(self, purge: _Purge) -> Future[int | None]:
        self._open[purge] = self._open.get(purge, 0) + 1
        purged = self._tiers[purge.store].purge(self._keys.scope(purge.tenant, purge.adapter, purge.salt))
        purged.add_done_callback(partial(self._end, purge))
        return purged

    def _end(self, purge: _Purge, purged: Future[int | None]) -> None:
        """Note the end of a call, on a thread of the store."""
        has_answered = not purged.cancelled() and purged.result() is not None
        self._ended.put((purge, has_answered))
        if not has_answered:
            self._wake()

    def _note_ended(self) -> None:
        while not self._ended.empty():
            purge, has_answered = self._ended.get()
            self._open[purge] -= 1
            if not self._open[purge]:
                del self._open[purge]
            if not has_answered:
                self._failed.add(purge)
