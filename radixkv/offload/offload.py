"""The interface of the tiers below the device for the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from radixkv.api.retention import Grant, Retention
from radixkv.api.segments import StoredPage
from radixkv.api.stats import TierStats
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import InvalidRequest
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.copies import BlockCopier
from radixkv.offload.deleter import Deleter
from radixkv.offload.disk_record import DiskRecord
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.offload.loader import Loader
from radixkv.offload.lookups import Lookups
from radixkv.offload.purge import Deletion, Purger
from radixkv.offload.restart import DiskScan, ShutdownSave
from radixkv.offload.saver import EvictedCopies, Saver
from radixkv.offload.tiers.block_store import PutOutcome
from radixkv.offload.tiers.tier import Tier
from radixkv.offload.touches import Touches
from radixkv.scheduling.request import Request
from radixkv.scheduling.step_plan import Slice

_log = logging.getLogger(__name__)
CLOSE_LIMIT_S = 10.0
_LAST_TOUCH_LIMIT_S = 1.0
_RETRY_PERIOD_S = 1.0
_POLL_PERIOD_S = 0.05  # between two checks for finished saves while a listener is on


class Offload:
    """Saves evicted blocks to the tiers, and loads stored blocks for requests.

    Only the engine's thread uses it, except for `stats`. No method waits for a store, except `close`.

    Args:
        cache: the radix trees.
        offload_index: listens to the cache.
        tiers: the tiers, one for each in the index.
        mover: copies blocks between the pool and host memory.
        max_bytes: bound of the copies that wait to be stored; see `Saver`. Also the bound of the blocks that are being
            loaded, or are loaded and wait for requests; see `Loader`.
        keys: computes the keys of blocks.
        load_or_compute: decides between loading and computing.
        record: records for the next process what the tier `disk` holds; None without a disk.
        clock: seconds, monotonic.
        on_close: called when all tiers have been closed.
        unopened: names of the tiers that could not be opened, for the statistics.
        wake: called on any thread, to wake the engine's thread.

    Attributes:
        index: see `offload_index`.
        tiers: see above, by name.
        purger: purges namespaces from the tiers.
    """

    def __init__(
        self,
        cache: PrefixCache,
        offload_index: OffloadIndex,
        tiers: Sequence[Tier],
        mover: BlockCopier,
        max_bytes: int,
        keys: BlockKeys,
        load_or_compute: LoadOrCompute,
        record: DiskRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], None] = lambda: None,
        unopened: Sequence[str] = (),
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = offload_index
        self.tiers = {tier.name: tier for tier in tiers}
        self._cache = cache
        self._clock = clock
        self._load_or_compute = load_or_compute
        self._on_close = on_close
        self._unopened = tuple(unopened)
        self._deleter = Deleter(offload_index, self.tiers, wake)
        self._saver = Saver(offload_index, self.tiers, self._deleter, mover, max_bytes, record)
        self._loader = Loader(cache, offload_index, self.tiers, mover, self._load_or_compute, clock, wake, max_bytes)
        shared = {name: tier for name, tier in self.tiers.items() if offload_index.tiers[name].is_shared}
        self.purger = Purger(offload_index, self.tiers, self._saver, self._deleter, keys, wake)
        self._lookups = Lookups(offload_index, shared, self.purger, load_or_compute, clock, wake, cache.block_size)
        self._touches = Touches(offload_index, shared, clock, wake)
        self._copies: EvictedCopies | None = None  # not passed to the tiers yet
        self._next_retry_s = clock()
        self._resuming: set[Request] = set()  # preempted requests for which `begin_again` was called
        self._disk_scan = None
        if record is not None:
            tier_index = offload_index.tiers["disk"]
            delete = partial(self._deleter.delete, "disk")
            self._disk_scan = DiskScan(record, tier_index, offload_index.retention, delete, wake)
        self._shutdown_save = ShutdownSave(cache, offload_index, self._saver, record)

    def seconds_until_due(self) -> float | None:
        """Return the seconds until `copy` must be called even if no step runs; None if it need not be called."""
        if self.index.has_evicted_blocks or (self._disk_scan is not None and self._disk_scan.has_more):
            return 0.0
        if self.index.listener.is_on and self._saver.has_waiting:
            return _POLL_PERIOD_S
        is_unfinished = self._saver.has_waiting or self._deleter.has_failed or self.purger.has_failed
        is_unfinished = is_unfinished or self._loader.is_copying
        until_touch_s = self._touches.seconds_until_due()
        if not is_unfinished:
            return until_touch_s
        return _RETRY_PERIOD_S if until_touch_s is None else min(_RETRY_PERIOD_S, until_touch_s)

    def stats(self) -> list[TierStats]:
        """Return the statistics of the tiers, the fastest first, then those that could not be opened. Thread-safe."""
        return [*map(self._stats_of, self.tiers.values()), *map(_stats_of_unopened, self._unopened)]

    def begin(self, request: Request) -> bool:
        """Start to load blocks for a new request. Returns whether the request must wait until `ready` returns it."""
        self._poll()
        fetched, request.fetched = request.fetched, None
        if not request.params.read_cache:
            return False
        if fetched is not None:
            self._loader.take(request, fetched)
            return False
        if self.index.is_empty:
            return False
        first_block = self._num_cached_blocks(request.namespace, request.tokens)
        return self._lookups.begin(request, first_block) or self._loader.begin(request, first_block)

    def begin_again(self, request: Request) -> bool:
        """Start to load blocks that were evicted since a request was preempted, once per preemption.

        Blocks that are not in the index are not looked up in shared stores. Returns the same as `begin`.
        """
        if request in self._resuming or not request.params.read_cache:
            return False
        self._resuming.add(request)
        return self._load(request)

    def stored_blocks(self, tenant: str) -> dict[str, int]:
        """Count a tenant's blocks in each tier, stored or being stored. In shared stores, only known blocks count."""
        self._poll()
        return {name: tier_index.owned.num_by_tenant[tenant] for name, tier_index in self.index.tiers.items()}

    def stored_tokens(self, namespace: Namespace, tokens: bytes, cached_tokens: int) -> int:
        """Count the tokens after the cached ones that tiers are known to hold."""
        self._poll()
        first_block, run = self._loader.find(namespace, tokens, self._num_cached_blocks(namespace, tokens))
        return max(0, (first_block + len(run)) * self._cache.block_size - cached_tokens) if run else 0

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention, on_device: Grant) -> Grant:
        """Set the retention priority of the stored blocks of a prompt; see `OffloadIndex.retain`."""
        self._poll()
        return self.index.retain(namespace, tokens, retention, on_device, self._clock())

    def stored(self, name: str, start: int, tenant: str | None, max_listed: int) -> StoredPage:
        """List the namespaces that have blocks in a tier; see `TierIndex.page`.

        Raises:
            InvalidRequest: there is no such tier.
        """
        tier_index = self.index.tiers.get(name)
        if tier_index is None:
            raise InvalidRequest(f"store: expected one of {', '.join(self.index.tiers)}, got {name!r}")
        self._poll()
        return tier_index.page(start, tenant, max_listed)

    @property
    def has_results(self) -> bool:
        """Whether loads or lookups have ended since the last `ready`."""
        return self._loader.has_ended or self._lookups.has_ended

    @property
    def is_loading(self) -> bool:
        """Whether blocks are being loaded, or looked up in shared stores to be loaded."""
        return self._lookups.are_any_open or self._loader.is_loading

    def ready(self) -> list[Request]:
        """Return the requests that no longer wait, in order of arrival."""
        without_load = [request for request in self._lookups.ended() if not self._load(request)]
        return sorted([*without_load, *self._loader.ready()], key=lambda request: request.arrival)

    def copy(self) -> None:
        """Copy evicted blocks, and published blocks for shared stores, before their memory is reused.

        No block may be evicted between this call and `save`.
        """
        assert self._copies is None, "the previous copies were saved"
        self._take_scanned()
        self.index.retention.expire(self._clock())
        self._retry()
        self._touches.process_results()
        self._copies = self._saver.copy()

    def save(self) -> None:
        """Pass the copies of the last `copy` to the tiers, and touch used blocks in shared stores."""
        copies, self._copies = self._copies, None
        if copies is not None:
            self._saver.save(copies)
        self._touches.send()  # after the writes, so that new blocks are touched as well

    def has_load(self, request: Request) -> bool:
        """Whether blocks were loaded, or are being loaded, for a request."""
        return self._loader.has_load(request)

    def fill(self, request: Request, lease: Lease) -> int:
        """Copy loaded blocks into a request's blocks; see `Loader.fill`."""
        self._resuming.discard(request)
        if not self._loader.has_load(request):
            return lease.cached_tokens
        copies = self._saver.copy()
        try:
            return self._loader.fill(request, lease)
        finally:
            self._saver.save(copies)  # after `fill` has read the loaded blocks, since saving may evict them from a tier

    def leave(self, request: Request) -> None:
        """Forget a finished request."""
        self._resuming.discard(request)
        self._lookups.leave(request)
        self._loader.leave(request)

    def note_step(self, seconds: float, slices: Sequence[Slice]) -> None:
        """Record how long a step took."""
        self._load_or_compute.note_step(seconds, [(each.start, each.end) for each in slices])

    def wait_for_scan(self) -> Iterator[None]:
        """Yield until the disk is scanned."""
        return iter(()) if self._disk_scan is None else self._disk_scan.wait_for_end()

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> list[Deletion]:
        """Purge the namespaces with these names, None for any, from all tiers; in shared stores, for all servers.

        Waiting requests do not get any of these blocks. The disk must be scanned before; see `wait_for_scan`.
        """
        self._take_scanned()
        self._loader.forget(tenant, adapter, salt)
        deletions = self.purger.purge(tenant, adapter, salt)
        if self._disk_scan is not None and self._disk_scan.has_failed:
            failed_deletion: Future[int | None] = Future()
            failed_deletion.set_result(None)
            deletions.append(Deletion("disk", failed_deletion))
        return deletions

    def close(self) -> None:
        """Save the blocks on the device to the disk and finish deletions, in at most 10 s, then close the tiers."""
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        knows_disk = self._disk_scan is None or self._disk_scan.finish(CLOSE_LIMIT_S / 2)
        if not knows_disk:
            _log.warning("tier disk: the scan did not finish before shutdown, so retention may be lost")
        self._loader.close()
        self._deleter.retry()  # before the saves: a store runs deletions and saves in the order of their calls
        self._saver.flush()
        self._touches.finish(_LAST_TOUCH_LIMIT_S)
        if not self._shutdown_save.run(deadline_s - time.monotonic(), knows_disk=knows_disk):
            _log.warning("tiers: not all blocks were stored within %s s of shutdown", CLOSE_LIMIT_S)
        if not self._deleter.finish(max(0.0, deadline_s - time.monotonic())):
            _log.error("tiers: not all purged or evicted blocks were deleted; the next process will find the others")
        for tier in self.tiers.values():
            tier.close()
        self._on_close()

    def _load(self, request: Request) -> bool:
        """Start to load the blocks that the index knows. Returns the same as `begin`."""
        return self._loader.begin(request, self._num_cached_blocks(request.namespace, request.tokens))

    def _num_cached_blocks(self, namespace: Namespace, tokens: bytes) -> int:
        """Count whole blocks on the device, also those without their parts of windowed layers, which may be loaded."""
        cache = self._cache
        num_tokens = cache.match(namespace, tokens).cached_tokens
        if cache.windows.pools:
            num_tokens = max(num_tokens, cache.num_found_tokens(namespace, tokens))
        return num_tokens // cache.block_size

    def _retry(self) -> None:
        """Retry failed calls, at most once per second."""
        if self._clock() >= self._next_retry_s and (self._deleter.has_failed or self.purger.has_failed):
            self._next_retry_s = self._clock() + _RETRY_PERIOD_S
            self._deleter.retry()
            self.purger.retry()

    def _poll(self) -> None:
        """Process finished saves and part of the disk scan."""
        self._saver.note_ended()
        self._take_scanned()

    def _take_scanned(self) -> None:
        if self._disk_scan is not None:
            self._disk_scan.take()

    def _stats_of(self, tier: Tier) -> TierStats:
        """Return the statistics of a tier. Any thread may call this."""
        name = tier.name
        size = tier.size()
        counts = tier.counts()
        num_refused = sum(counts.saved.get(outcome, 0) for outcome in (PutOutcome.NO_ROOM, PutOutcome.TOO_LARGE))
        return TierStats(
            tier=name,
            is_working=tier.is_working(),
            blocks=size.num_objects,
            used_bytes=size.used_bytes,
            capacity_bytes=size.capacity_bytes,
            loaded_blocks=counts.loaded,
            loaded_bytes=counts.loaded_bytes,
            load_s=counts.load_s,
            missed_blocks=sum(counts.misses.values()),
            computed_blocks=self._loader.num_computed_blocks[name],
            saved_blocks=counts.saved.get(PutOutcome.STORED, 0),
            refused_blocks=counts.failed_saves + num_refused,
            dropped_blocks=self._saver.num_dropped_blocks[name],
            evicted_blocks=counts.evicted,
            touched_blocks=self._touches.num_touched_blocks[name],
            rewritten_blocks=self._touches.num_rewritten_blocks[name],
        )


def _stats_of_unopened(name: str) -> TierStats:
    """Return the statistics of a tier that could not be opened."""
    return TierStats(
        tier=name,
        is_working=False,
        blocks=0,
        used_bytes=0,
        capacity_bytes=0,
        loaded_blocks=0,
        loaded_bytes=0,
        load_s=0.0,
        missed_blocks=0,
        computed_blocks=0,
        saved_blocks=0,
        refused_blocks=0,
        dropped_blocks=0,
        evicted_blocks=0,
    )
