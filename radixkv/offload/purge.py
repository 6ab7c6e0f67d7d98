"""Purges: deletion of whole namespaces from the tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.cache.purge import Purged
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.deleter import Deleter, RetriedCalls
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock
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
        elif begun.result().deletions:
            arguments = (begun.result(), limit_s, done)
            waiter = threading.Thread(target=_wait_for_deletions, args=arguments, name="radixkv-purge", daemon=True)
            try:
                waiter.start()
            except RuntimeError:  # the system has no more threads
                _wait_for_deletions(begun.result(), 0.0, done)
        else:
            done.set_result(begun.result().purged)

    begun.add_done_callback(wait_for_tiers)
    return done


def _wait_for_deletions(begun: PendingPurge, limit_s: float, done: Future[Purged]) -> None:
    """Complete the future of a purge as soon as its deletions have ended, or after `limit_s`."""
    end_s = time.monotonic() + limit_s
    num_ended = threading.Semaphore(0)  # `concurrent.futures.wait` would ignore cancelled calls
    for deletion in begun.deletions:
        deletion.num_deleted.add_done_callback(lambda _: num_ended.release())
    for _ in begun.deletions:
        num_ended.acquire(timeout=max(0.0, end_s - time.monotonic()))
    done.set_result(begun.purged._replace(stored_blocks=_sums(begun.deletions)))


def _sums(deletions: Sequence[Deletion]) -> dict[str, int | None]:
    """Add up the deleted blocks of each tier; None if one of its calls failed or has not ended."""
    sums: dict[str, int | None] = {}
    for tier, deleted in deletions:
        sum_before = sums.get(tier, 0)
        num_deleted = None if deleted.cancelled() or not deleted.done() else deleted.result()
        sums[tier] = None if sum_before is None or num_deleted is None else sum_before + num_deleted
    return sums


class _Purge(NamedTuple):
    """A purge of a shared store: the name of its tier, and the names of the namespaces, None for any."""

    tier: str
    tenant: str | None
    adapter: str | None
    salt: str | None


class Purger:
    """Purges namespaces from all tiers.

    From shared stores, a purge also deletes the blocks that other servers stored. Until a store has confirmed this, no
    blocks of these namespaces are looked up in it: only blocks that this server stores there afterwards can be loaded.
    Failed purges of shared stores are retried later.

    In the other tiers, a purge also deletes victims: blocks that the index has removed in favor of other blocks, but
    that the store may still have. The store evicts a victim when it saves the block that replaces it. If it has enough
    space for both, it keeps the victim, and the `Deleter` deletes it:

        in the index ── removed: a victim ─┬─ evicted by the store, for the block that replaces it
                                           └─ kept by the store, which had space ──▶ deleted by the `Deleter`

    Args:
        offload_index: knows the stored blocks, and the victims whose replacement is not being saved yet.
        tiers: the tiers by name.
        saver: knows the victims of saves that are in flight.
        deleter: deletes from the tiers that are not shared, and knows the deletions that are not confirmed.
        keys: computes the keys of blocks.
        wake: called on any thread when a purge of a shared store has failed, so that the engine calls `retry`.
    """

    def __init__(
        self,
        offload_index: OffloadIndex,
        tiers: Mapping[str, Tier],
        saver: Saver,
        deleter: Deleter,
        keys: BlockKeys,
        wake: Callable[[], None],
    ) -> None:
        self._index = offload_index
        self._tiers = tiers
        self._saver = saver
        self._deleter = deleter
        self._keys = keys
        self._shared_purges = RetriedCalls[_Purge](wake)

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> list[Deletion]:
        """Remove the namespaces with these names, None for any, from the index, and delete their blocks in each tier.

        Complexity: O(namespaces + their blocks + keys of saves and deletions in flight).
        """
        scope = self._keys.scope(tenant, adapter, salt)
        deletions: list[Deletion] = []
        for name, keys in self._index.purge(tenant, adapter, salt).items():
            if self._index.tiers[name].is_shared:
                deletions.append(Deletion(name, self._purge_shared(_Purge(name, tenant, adapter, salt))))
            else:
                in_flight = filter(scope.has, (*self._saver.victims(name), *self._deleter.unconfirmed(name)))
                keys = list(dict.fromkeys((*keys, *self._index.drop_victims(name, scope.has), *in_flight)))
                deletions.append(Deletion(name, self._deleter.delete(name, keys)))
        return deletions

    @property
    def has_failed(self) -> bool:
        """Whether there are purges of shared stores to retry."""
        return self._shared_purges.has_failed

    def is_purging(self, tier: str, namespace: Namespace) -> bool:
        """Whether a shared store may still hold purged blocks of a namespace. Complexity: O(unconfirmed purges)."""
        return any(
            each.tier == tier and namespace.is_among(each.tenant, each.adapter, each.salt)
            for each in self._shared_purges.unconfirmed()
        )

    def is_purging_any(self, tier: str, blocks: Iterable[KeyedBlock]) -> bool:
        """Whether a shared store may still hold purged blocks of any namespace that owns one of these blocks.

        The blocks of a prompt that invokes an adapter are in two namespaces: from the invocation on, in that of the
        adapter.
        """
        return any(self.is_purging(tier, owner) for owner in {block.namespace for block in blocks})

    def retry(self) -> None:
        """Retry failed purges of shared stores."""
        for each in dict.fromkeys(self._shared_purges.take_failed()):
            self._purge_shared(each)

    def _purge_shared(self, purge: _Purge) -> Future[int | None]:
        purged = self._tiers[purge.tier].purge(self._keys.scope(purge.tenant, purge.adapter, purge.salt))
        self._shared_purges.start(purge, purged)
        return purged
