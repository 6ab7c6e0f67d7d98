"""Deletion of blocks from the tiers: of single keys, and of whole namespaces when they are purged."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from radixkv.cache.purge import Purged
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.deleter import Deleter
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.saver import Saver
from radixkv.offload.tiers.tier import Tier


class Deletion(NamedTuple):
    """Blocks that a store was told to delete.

    Attributes:
        store: its name.
        num_deleted: blocks that it had; None if it could not be asked.
    """

    store: str
    num_deleted: Future[int | None]


class PendingPurge(NamedTuple):
    """A purge that is done but for the stores.

    Attributes:
        purged: what became of the blocks on the device.
        deletions: what the stores were told.
    """

    purged: Purged
    deletions: Sequence[Deletion]


def not_asked() -> Future[int | None]:
    """Return the answer of a store that could not be asked."""
    answer: Future[int | None] = Future()
    answer.set_result(None)
    return answer


def when_deleted(begun: Future[PendingPurge]) -> Future[Purged]:
    """Return a future of the whole outcome, which comes when all stores have answered."""
    done: Future[Purged] = Future()

    def wait_for_stores(begun: Future[PendingPurge]) -> None:
        if begun.cancelled():
            done.cancel()
        elif not done.set_running_or_notify_cancel():
            return
        elif (error := begun.exception()) is not None:
            done.set_exception(error)
        else:
            _Wait(done, begun.result()).begin()

    begun.add_done_callback(wait_for_stores)
    return done


class _Wait:
    """Waits for the last store."""

    def __init__(self, done: Future[Purged], begun: PendingPurge) -> None:
        self._done = done
        self._begun = begun
        self._lock = threading.Lock()
        self._num_left = len(begun.deletions) + 1

    def begin(self) -> None:
        for deletion in self._begun.deletions:
            deletion.num_deleted.add_done_callback(lambda _: self._note_end())
        self._note_end()

    def _note_end(self) -> None:
        with self._lock:
            self._num_left -= 1
            if self._num_left:
                return
        self._done.set_result(self._begun.purged._replace(stored_blocks=_sums(self._begun.deletions)))


def _sums(deletions: Sequence[Deletion]) -> dict[str, int | None]:
    """Add up what each store has deleted; None if it could not be asked once."""
    sums: dict[str, int | None] = {}
    for store, deleted in deletions:
        known, number = sums.get(store, 0), None if deleted.cancelled() else deleted.result()
        sums[store] = None if known is None or number is None else known + number
    return sums


class LocalPurger:
    """Deletes what this server's own stores hold of namespaces: also what nobody finds there any more.

        on the tier_index ── given up ──▶ the store is told, with what comes instead ──▶ gone
                                         └── kept, as there was room ──▶ deleted ──▶ gone

    Args:
        offload_index: knows what is stored, and what is to be given up.
        saver: knows what stores were told to give up.
        deleter: deletes, and knows what was not deleted yet.
        keys: of the blocks.
    """

    def __init__(self, offload_index: OffloadIndex, saver: Saver, deleter: Deleter, keys: BlockKeys) -> None:
        self._index = offload_index
        self._saver = saver
        self._deleter = deleter
        self._keys = keys

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> list[Deletion]:
        """Forget the namespaces with these names, None for any, on all tier_indexes, and delete what own stores have.

        Complexity: O(namespaces + blocks of these + keys that stores have not given up yet).
        """
        found, scope = self._index.purge(tenant, adapter, salt), self._keys.scope(tenant, adapter, salt)
        deletions: list[Deletion] = []
        for name, keys in found.items():
            if not self._index.tiers[name].is_shared:
                leaving = filter(scope.has, (*self._saver.given_up(name), *self._deleter.unanswered(name)))
                keys = list(dict.fromkeys((*keys, *self._index.drop_given_up(name, scope.has), *leaving)))
                deletions.append(Deletion(name, self._deleter.delete(name, keys)))
        return deletions


class _Purge(NamedTuple):
    """A purge of one store: its name, and the names of the namespaces, None for any."""

    store: str
    tenant: str | None
    adapter: str | None
    salt: str | None


class SharedPurger:
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
