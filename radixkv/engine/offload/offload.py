"""The stores below the device, as the engine uses them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from radixkv.api.retention import Grant, Retention
from radixkv.api.segments import StoredPage
from radixkv.api.stats import TierStats
from radixkv.cache.elsewhere.elsewhere import Elsewhere
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.offload.deleter import Deleter
from radixkv.engine.offload.deletions import Deletion, not_asked
from radixkv.engine.offload.disk_record import DiskRecord
from radixkv.engine.offload.earlier_blocks import EarlierBlocks
from radixkv.engine.offload.last_save import LastSave
from radixkv.engine.offload.loader import Loader
from radixkv.engine.offload.lookups import Lookups
from radixkv.engine.offload.own_purger import OwnPurger
from radixkv.engine.offload.purger import Purger
from radixkv.engine.offload.saver import Copies, Saver
from radixkv.engine.offload.store_stats import stats_of, stats_of_closed
from radixkv.engine.offload.stored_grant import grant_stored
from radixkv.engine.transfer.transfer import TransferParts
from radixkv.errors import InvalidRequest
from radixkv.namespace import Namespace
from radixkv.scheduling.load_or_compute import LoadOrCompute
from radixkv.scheduling.request import Request
from radixkv.scheduling.step_plan import Slice
from radixkv.storage.mover import BlockMover
from radixkv.storage.tiers.block_key import BlockKeys
from radixkv.storage.tiers.tier import Tier

_log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 10.0
_RETRY_PERIOD_S = 1.0
_NEWS_PERIOD_S = 0.05  # between two looks for what stores have taken, while somebody is told


def do_nothing() -> None:
    """Neither copy nor save, where there are no stores."""


class Offload:
    """Saves blocks that leave the device, and loads them for requests that come later.

    One thread uses it, the engine's. It never makes anybody wait for a store, but for the end.

    Args:
        cache: the trees.
        elsewhere: listens to them.
        tiers: a store for each shelf.
        mover: copies blocks.
        max_bytes: bound of what waits to be stored, and of what was loaded and waits for its request.
        keys: of the blocks in all stores.
        choice: decides between loading and computing.
        record: of the store `disk`, which outlives the process; None without one.
        clock: seconds, monotonic.
        on_close: called when all stores are closed.
        closed: names of stores that could not be opened.

    Attributes:
        elsewhere, tiers: see above; the tiers by name.
        purger: of the shared stores.
        wake: called on a store's thread when there is something to do; the engine sets it.
        transfer: to give and take K/V of these blocks; None for neither.
    """

    def __init__(
        self,
        cache: PrefixCache,
        elsewhere: Elsewhere,
        tiers: Sequence[Tier],
        mover: BlockMover,
        max_bytes: int,
        keys: BlockKeys,
        choice: LoadOrCompute,
        record: DiskRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], None] = do_nothing,
        closed: Sequence[str] = (),
    ) -> None:
        self.elsewhere = elsewhere
        self.tiers = {tier.name: tier for tier in tiers}
        self.transfer: TransferParts | None = None
        self.wake: Callable[[], None] = lambda: None
        self._cache, self._clock, self._choice, self._on_close = cache, clock, choice, on_close
        self._closed = [stats_of_closed(name) for name in closed]
        self._deleter = Deleter(elsewhere, self.tiers, lambda: self.wake())
        self._saver = Saver(elsewhere, self.tiers, self._deleter, mover, max_bytes, record)
        self._loader = Loader(cache, elsewhere, self.tiers, mover, self._choice, clock, lambda: self.wake(), max_bytes)
        shared = {name: tier for name, tier in self.tiers.items() if elsewhere.shelves[name].is_shared}
        self.purger = Purger(shared, keys, lambda: self.wake())
        self._own_purger = OwnPurger(elsewhere, self._saver, self._deleter, keys)
        self._lookups = Lookups(elsewhere, shared, self.purger, choice, clock, lambda: self.wake(), cache.block_size)
        self._copies: Copies | None = None  # that stores have not got
        self._next_retry_s = clock()
        self._resuming: set[Request] = set()  # those that were paused, and for which `begin_again` was called
        self._earlier = None
        if record is not None:
            shelf, delete = elsewhere.shelves["disk"], partial(self._deleter.delete, "disk")
            self._earlier = EarlierBlocks(record, shelf, elsewhere.retention, delete, lambda: self.wake())
        self._last_save = LastSave(cache, elsewhere, self._saver, record)

    def seconds_to_rest(self) -> float | None:
        """Seconds until `copy` is to be called although nothing is written; None if it need not be."""
        if self.elsewhere.has_departures or (self._earlier is not None and self._earlier.has_more):
            return 0.0
        if self.elsewhere.listener.is_on and self._saver.has_waiting:
            return _NEWS_PERIOD_S
        is_unfinished = self._saver.has_waiting or self._deleter.has_failed or self.purger.has_failed
        is_unfinished = is_unfinished or self._loader.is_copying
        return _RETRY_PERIOD_S if is_unfinished else None

    def stats(self) -> list[TierStats]:
        """Count what the stores hold and did, the fastest first, then those that are closed. Any thread may ask."""
        computed, dropped = self._loader.num_computed_blocks, self._saver.num_dropped_blocks
        return [*(stats_of(tier, computed[name], dropped[name]) for name, tier in self.tiers.items()), *self._closed]

    def begin(self, request: Request) -> bool:
        """Start to load what a new request could use. Returns whether it is to wait until `ready` returns it."""
        self._take_news()
        fetched, request.fetched = request.fetched, None
        if not request.params.read_cache:
            return False
        if fetched is not None:
            self._loader.take(request, fetched)
            return False
        if self.elsewhere.is_empty:
            return False
        first_block = self._num_cached_blocks(request.namespace, request.tokens)
        return self._lookups.begin(request, first_block) or self._loader.begin(request, first_block)

    def begin_again(self, request: Request) -> bool:
        """Start to load what has left the device since a request was paused, once for each pause.

        Shared stores are not asked for what is not known to be there. Returns as `begin` does.
        """
        if request in self._resuming or not request.params.read_cache:
            return False
        self._resuming.add(request)
        return self._load(request)

    def stored_blocks(self, tenant: str) -> dict[str, int]:
        """Count a tenant's blocks in each store, of shared ones those that are known."""
        self._take_news()
        return {name: shelf.owned.num_by_tenant[tenant] for name, shelf in self.elsewhere.shelves.items()}

    def stored_tokens(self, namespace: Namespace, tokens: bytes, cached_tokens: int) -> int:
        """Count the tokens after the cached ones that stores are known to have."""
        self._take_news()
        first_block, found = self._loader.find(namespace, tokens, self._num_cached_blocks(namespace, tokens))
        return max(0, (first_block + len(found)) * self._cache.block_size - cached_tokens) if found else 0

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention, on_device: Grant) -> Grant:
        """Give what is stored of a prompt a priority, whatever it was before; shared stores know none.

        Args:
            namespace, tokens: the prompt, as the cache knows it.
            retention: the priority and its range.
            on_device: what the cache granted of it.

        Returns:
            What was granted in all.
        """
        self._take_news()
        size, now_s = self._cache.block_size, self._clock()
        return grant_stored(self.elsewhere, size, namespace, tokens, retention, on_device, now_s)

    def stored(self, name: str, start: int, tenant: str | None, max_listed: int) -> StoredPage:
        """List the namespaces of which a store holds blocks; see `Shelf.page`. Of shared ones, those known here.

        Raises:
            InvalidRequest: there is no such store.
        """
        shelf = self.elsewhere.shelves.get(name)
        if shelf is None:
            raise InvalidRequest(f"store: expected one of {', '.join(self.elsewhere.shelves)}, got {name!r}")
        self._take_news()
        return shelf.page(start, tenant, max_listed)

    @property
    def has_answers(self) -> bool:
        """Whether stores have answered what requests wait for, since `ready` was called last."""
        return self._loader.has_ended or self._lookups.has_ended

    def ready(self) -> list[Request]:
        """Return the requests that wait no more, in the order of their arrival."""
        known = [request for request in self._lookups.ended() if not self._load(request)]
        return sorted([*known, *self._loader.ready()], key=lambda request: request.arrival)

    def copy(self) -> None:
        """Copy what has left the device, and what shared stores are to have, before anything is written over it.

        Nothing is to leave until `save`.
        """
        assert self._copies is None, "stores have got what was copied before"
        self._take_found()
        self.elsewhere.retention.expire(self._clock())
        self._retry()
        self._copies = self._saver.copy()

    def save(self) -> None:
        """Give the stores what was copied, if they have not got it."""
        copies, self._copies = self._copies, None
        if copies is not None:
            self._saver.save(copies)

    def fill(self, request: Request, lease: Lease) -> int:
        """Copy what was loaded for a request into its blocks; see `Loader.fill`."""
        self._resuming.discard(request)
        if not self._loader.has_load(request):
            return lease.cached_tokens
        copies = self._saver.copy()
        try:
            return self._loader.fill(request, lease)
        finally:
            self._saver.save(copies)  # what goes for them may be what was just read

    def leave(self, request: Request) -> None:
        """Forget a request that is over."""
        self._resuming.discard(request)
        self._lookups.leave(request)
        self._loader.leave(request)

    def note_step(self, seconds: float, slices: Sequence[Slice]) -> None:
        """Learn how long computing takes."""
        self._choice.note_step(seconds, [(part.start, part.end) for part in slices])

    def reading(self) -> Iterator[None]:
        """Yield until it is known what earlier processes left on the disk."""
        return iter(()) if self._earlier is None else self._earlier.reading()

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> list[Deletion]:
        """Forget what is stored of the namespaces with these names, None for any; in shared stores of all servers.

        Requests that wait for some of it get nothing of it. What is on disk is known only if `reading` is over.
        """
        self._take_found()
        self._loader.forget(tenant, adapter, salt)
        own = self._own_purger.purge(tenant, adapter, salt)
        purges = self.purger.purge(tenant, adapter, salt)
        if self._earlier is not None and self._earlier.has_failed:
            own.append(Deletion("disk", not_asked()))
        return own + [Deletion(name, purged) for name, purged in purges.items()]

    def close(self) -> None:
        """Write what is on the device to the disk, and delete what is to go, in 10 s at most; close the stores."""
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        knows_disk = self._earlier is None or self._earlier.finish(CLOSE_LIMIT_S / 2)
        if not knows_disk:
            _log.warning("tier disk: expected to know what it holds, got no end of the list: retention may be lost")
        self._loader.close()
        self._deleter.retry()  # stores delete before they write
        if not self._last_save.run(deadline_s - time.monotonic(), knows_disk=knows_disk):
            _log.warning("tiers: expected to store all blocks within %s s, got fewer", CLOSE_LIMIT_S)
        if not self._deleter.finish(max(0.0, deadline_s - time.monotonic())):
            _log.error(
                "tiers: expected to delete what was purged or given up, got fewer: a next process finds the rest"
            )
        for tier in self.tiers.values():
            tier.close()
        self._on_close()

    def _load(self, request: Request) -> bool:
        return self._loader.begin(request, self._num_cached_blocks(request.namespace, request.tokens))

    def _num_cached_blocks(self, namespace: Namespace, tokens: bytes) -> int:
        """Count whole blocks on the device, with or without parts: what is loaded after them may have its own."""
        cache = self._cache
        num_tokens = cache.match(namespace, tokens).cached_tokens
        if cache.windows.pools:
            num_tokens = max(num_tokens, cache.num_found_tokens(namespace, tokens))
        return num_tokens // cache.block_size

    def _retry(self) -> None:
        """Ask stores again what they could not be asked, once in a second."""
        if self._clock() >= self._next_retry_s and (self._deleter.has_failed or self.purger.has_failed):
            self._next_retry_s = self._clock() + _RETRY_PERIOD_S
            self._deleter.retry()
            self.purger.retry()

    def _take_news(self) -> None:
        """Note what stores have taken, and some of what was found on the disk."""
        self._saver.note_ended()
        self._take_found()

    def _take_found(self) -> None:
        if self._earlier is not None:
            self._earlier.take()
