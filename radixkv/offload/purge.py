"""Purges: deletion of whole namespaces from the tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.cache.purge import Purged
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.deleter import Deleter
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.retried_calls import RetriedCalls
from radixkv.offload.saver import Saver
from radixkv.offload.tiers.tier import Tier

# A purge waits this long for the tiers. Scanning a million keys of a Redis takes about a second.
MAX_WAIT_S = 5.0


class Deletion(NamedTuple):
    """A deletion of blocks in one tier.

    Attributes:
        tier: its name.
        num_deleted: number of deleted blocks; None if the call failed.
    """

    tier: str
    num_deleted: Future[int | None]


class PendingPurge(NamedTuple):
    """A purge whose deletions in the tiers are in flight.

    Attributes:
        purged: the result on the device.
        deletions: the deletions in the tiers.
    """

    purged: Purged
    deletions: Sequence[Deletion]


def failed_deletion() -> Future[int | None]:
    """Return the `num_deleted` of a deletion that could not be started."""
    num_deleted: Future[int | None] = Future()
    num_deleted.set_result(None)
    return num_deleted


def when_deleted(begun: Future[PendingPurge], limit_s: float = MAX_WAIT_S) -> Future[Purged]:
    """Return a future of the result of a purge. It completes when all tiers have answered, or after `limit_s`.

    Args:
        begun: completes when the device is purged.
        limit_s: seconds to wait for the tiers afterwards. The result then has None for those that have not answered;
            their deletions continue, and nothing that was purged is loaded from them.
    """
    done: Future[Purged] = Future()

    def wait_for_tiers(begun: Future[PendingPurge]) -> None:
        if begun.cancelled():
            done.cancel()
        elif not done.set_running_or_notify_cancel():
            return
        elif (error := begun.exception()) is not None:
            done.set_exception(error)
        else:
            _PurgeWaiter(done, begun.result()).begin(limit_s)

    begun.add_done_callback(wait_for_tiers)
    return done


class _PurgeWaiter:
    """Waits for the last tier, for a limited time."""

    def __init__(self, done: Future[Purged], begun: PendingPurge) -> None:
        self._done = done
        self._purged = begun.purged
        self._deletions = list(begun.deletions)
        self._lock = threading.Lock()
        self._num_open = len(begun.deletions) + 1  # also counts `begin`, until it has added all callbacks
        self._is_over = False
        self._timer: threading.Timer | None = None

    def begin(self, limit_s: float) -> None:
        """Start to wait, at most `limit_s`."""
        for deletion in tuple(self._deletions):
            deletion.num_deleted.add_done_callback(lambda _: self._note_end())
        self._note_end()
        if not self._done.done():
            self._timer = timer = threading.Timer(limit_s, self._complete)
            timer.daemon = True
            timer.start()
            if self._done.done():  # the last tier answered before the timer was set
                self._stop_timer()

    def _note_end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open:
                return
        self._complete()

    def _complete(self) -> None:
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first:
            sums = _sums(self._deletions)
            self._deletions.clear()  # their callbacks refer to this waiter: only the garbage collector would free both
            self._done.set_result(self._purged._replace(stored_blocks=sums))
            self._stop_timer()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None  # it refers to this waiter, too
        if timer is not None:
            timer.cancel()


def _sums(deletions: Sequence[Deletion]) -> dict[str, int | None]:
    """Add up the deleted blocks of each tier; None if one of its calls failed or has not ended."""
    sums: dict[str, int | None] = {}
    for tier, deleted in deletions:
        sum_before = sums.get(tier, 0)
        num_deleted = None if deleted.cancelled() or not deleted.done() else deleted.result()
        sums[tier] = None if sum_before is None or num_deleted is None else sum_before + num_deleted
    return sums


class LocalPurger:
    """Purges the tiers that only this server uses.

    Victims are purged, too: blocks that the index has removed in favor of other blocks, but that the store may still
    have. The store evicts a victim when it saves the block that replaces it. If it has enough space for both, it keeps
    the victim, and the `Deleter` deletes it:

        in the index ── removed: a victim ─┬─ evicted by the store, for the block that replaces it
                                           └─ kept by the store, which had space ──▶ deleted by the `Deleter`

    Args:
        offload_index: knows the stored blocks, and the victims whose replacement is not being saved yet.
        saver: knows the victims of saves that are in flight.
        deleter: deletes, and knows the deletions that are not confirmed.
        keys: computes the keys of blocks.
    """

    def __init__(self, offload_index: OffloadIndex, saver: Saver, deleter: Deleter, keys: BlockKeys) -> None:
        self._index = offload_index
        self._saver = saver
        self._deleter = deleter
        self._keys = keys

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> list[Deletion]:
        """Remove the namespaces with these names, None for any, from the index, and delete them from local tiers.

        Complexity: O(namespaces + their blocks + keys of saves and deletions in flight).
        """
        removed = self._index.purge(tenant, adapter, salt)
        scope = self._keys.scope(tenant, adapter, salt)
        deletions: list[Deletion] = []
        for name, keys in removed.items():
            if not self._index.tiers[name].is_shared:
                in_flight = filter(scope.has, (*self._saver.victims(name), *self._deleter.unconfirmed(name)))
                keys = list(dict.fromkeys((*keys, *self._index.drop_victims(name, scope.has), *in_flight)))
                deletions.append(Deletion(name, self._deleter.delete(name, keys)))
        return deletions


class _Purge(NamedTuple):
    """A purge of one tier: its name, and the names of the namespaces, None for any."""

    tier: str
    tenant: str | None
    adapter: str | None
    salt: str | None


class SharedPurger:
    """Purges namespaces from shared stores, including the blocks that other servers stored.

    Until a tier has confirmed a purge, no blocks of these namespaces are looked up in it: only blocks that this server
    stores there afterwards can be loaded. Failed purges are retried later.

    Args:
        tiers: the shared stores by name.
        keys: computes the keys of blocks.
        wake: called on any thread when a call has failed, so that the engine calls `retry`.
    """

    def __init__(self, tiers: Mapping[str, Tier], keys: BlockKeys, wake: Callable[[], None] = lambda: None) -> None:
        self._tiers = tiers
        self._keys = keys
        self._calls = RetriedCalls[_Purge](wake)

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> dict[str, Future[int | None]]:
        """Purge each tier. Returns by tier a future of the number of deleted blocks; None if the call fails."""
        return {tier: self._start(_Purge(tier, tenant, adapter, salt)) for tier in self._tiers}

    @property
    def has_failed(self) -> bool:
        """Whether there are purges to retry."""
        return self._calls.has_failed

    def is_purging(self, tier: str, namespace: Namespace) -> bool:
        """Whether a tier may still hold purged blocks of a namespace. Complexity: O(unconfirmed purges)."""
        return any(
            each.tier == tier and namespace.is_among(each.tenant, each.adapter, each.salt)
            for each in self._calls.unconfirmed()
        )

    def is_purging_any(self, tier: str, blocks: Iterable[KeyedBlock]) -> bool:
        """Whether a tier may still hold purged blocks of any namespace that owns one of these blocks.

        The blocks of a prompt that invokes an adapter are in two namespaces: from the invocation on, in that of the
        adapter.
        """
        return any(self.is_purging(tier, owner) for owner in {block.namespace for block in blocks})

    def retry(self) -> None:
        """Retry failed purges."""
        for each in dict.fromkeys(self._calls.take_failed()):
            self._start(each)

    def _start(self, purge: _Purge) -> Future[int | None]:
        purged = self._tiers[purge.tier].purge(self._keys.scope(purge.tenant, purge.adapter, purge.salt))
        self._calls.start(purge, purged)
        return purged
