"""Loads stored blocks for waiting requests, and copies them into the pool when the requests are admitted."""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from radixkv.blocks import BlockIds
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.offload.copies import BlockCopier, Copy
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import FetchedBlocks, StoredBlock
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.offload.tiers.block_object import ObjectFault, Wanted
from radixkv.offload.tiers.block_store import Loan
from radixkv.offload.tiers.tier import Absence, LoadedBlock, Miss, Tier
from radixkv.scheduling.request import Request

REMOTE = "remote"  # the origin of blocks that were fetched from another server


class LoadedBlocks(NamedTuple):
    """The result of one call to a store.

    Attributes:
        blocks: the blocks that were loaded, by key.
        lost: keys of blocks that the store does not hold, or whose objects failed verification.
        is_timed: whether all blocks were loaded, so that the time of the call is representative.
    """

    blocks: dict[bytes, LoadedBlock]
    lost: list[bytes]
    is_timed: bool

    @classmethod
    def of(cls, keys: Sequence[bytes], loaded: Sequence[LoadedBlock | Miss] | None) -> LoadedBlocks:
        """Split the result of a store into loaded and lost blocks; `loaded` is None if the call was cancelled."""
        pairs = list(zip(keys, loaded or (), strict=False))
        blocks = {key: each for key, each in pairs if isinstance(each, LoadedBlock)}
        lost = [key for key, each in pairs if each is Absence.ABSENT or isinstance(each, ObjectFault)]
        return cls(blocks, lost, is_timed=len(blocks) == len(keys))


class Load:
    """Consecutive blocks of a prompt that are loaded with one call per tier.

    Attributes:
        run: the blocks, and which tier holds each.
        started_s: time of the start.
        futures: futures of the calls.
        blocks: the blocks loaded so far, by key.
        requests: the requests that wait for the load, or whose blocks it still has to fill.
        copies: the copies of its blocks into the pool that were started.
    """

    def __init__(self, run: Sequence[StoredBlock], started_s: float) -> None:
        self.run = run
        self.started_s = started_s
        self.futures: list[Future[list[LoadedBlock | Miss]]] = []
        self.blocks: dict[bytes, LoadedBlock] = {}
        self.requests: set[Request] = set()
        self.copies: list[Copy] = []
        self._open_tiers = set(self.tiers)

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers that hold some of the blocks, in the order of the run."""
        return list(dict.fromkeys(each.tier for each in self.run))

    @property
    def is_ended(self) -> bool:
        """Whether all calls have ended."""
        return not self._open_tiers

    def keys_of(self, tier: str) -> list[bytes]:
        """List the keys of the blocks that a tier holds."""
        return [each.block.key for each in self.run if each.tier == tier]

    def wanted_of(self, tier: Tier) -> list[Wanted]:
        """Return the blocks to request from a tier."""
        protection = tier.protection_of(self.run[0].block.namespace.tenant)
        blocks = (each.block for each in self.run if each.tier == tier.name)
        return [Wanted(block.key, block.tokens, protection) for block in blocks]

    def end_call(self, tier: str, outcome: LoadedBlocks) -> None:
        """Add the result of a call."""
        self._open_tiers.discard(tier)
        self.blocks.update(outcome.blocks)
        if self.is_ended:
            self.futures.clear()  # their callbacks refer to the load, and their results to the memory of its blocks

    def count_loaded(self, run: Sequence[StoredBlock]) -> int:
        """Count the loaded blocks of a run, up to the first that is not loaded."""
        missing = (index for index, each in enumerate(run) if each.block.key not in self.blocks)
        return next(missing, len(run))

    def cancel(self) -> None:
        """Cancel calls that have not started."""
        for future in self.futures:
            future.cancel()

    def release(self) -> None:
        """Release the loans of the stores."""
        for block in self.blocks.values():
            block.loan.release()
        self.blocks.clear()


class _PendingRun(NamedTuple):
    """A run of stored blocks for a request, and the load of at least the first of them.

    Fetched blocks are referenced as long as their bytes are used, since the fetcher counts their memory until they are
    garbage-collected.
    """

    load: Load
    first_block: int
    run: Sequence[StoredBlock]
    fetched: FetchedBlocks | None = None


class Loader:
    """Loads blocks while their requests wait and others compute.

        begin ──▶ stores ──▶ ready: the request waits for admission ─▶ fill: copied into its blocks, published
                                     └ aborted ──▶ released              └ copy is complete ──▶ released

    Requests whose stored blocks begin with the same block share a load, even if it has fewer blocks than one of them
    could load. The time limit of the stores bounds the wait. Blocks that are not loaded are computed.

    Args:
        cache: the radix trees.
        offload_index: knows which tier holds which block.
        tiers: the tiers by name.
        mover: copies blocks.
        load_or_compute: decides between loading and computing.
        clock: seconds, monotonic.
        wake: called on any thread when a call has ended, so that the engine calls `ready`.
        max_bytes: bound of blocks that are being loaded, or are loaded but not copied yet. Further blocks are computed.

    Attributes:
        num_computed_blocks: stored blocks that were computed because that was estimated to be faster, by tier.
    """

    def __init__(
        self,
        cache: PrefixCache,
        offload_index: OffloadIndex,
        tiers: Mapping[str, Tier],
        mover: BlockCopier,
        load_or_compute: LoadOrCompute,
        clock: Callable[[], float],
        wake: Callable[[], None],
        max_bytes: int,
    ) -> None:
        self.num_computed_blocks: Counter[str] = Counter()
        self._cache = cache
        self._index = offload_index
        self._tiers = tiers
        self._mover = mover
        self._load_or_compute = load_or_compute
        self._clock = clock
        self._wake = wake
        self._num_free_blocks = max_bytes // mover.payload_bytes
        self._loads: dict[bytes, Load] = {}  # by the key of the first block
        self._pending: dict[Request, _PendingRun] = {}
        self._waiting: set[Request] = set()  # requests that `ready` has not returned
        self._copying: deque[Load] = deque()  # no request uses them, but the device may still copy their blocks
        self._filled: deque[tuple[int, Sequence[Copy]]] = deque()  # number of blocks, and copies that may be incomplete
        self._ended: queue.SimpleQueue[tuple[Load, str, LoadedBlocks, float]] = queue.SimpleQueue()

    def begin(self, request: Request, first_block: int) -> bool:
        """Start to load blocks for a request. Returns whether the request must wait until `ready` returns it.

        Args:
            request: not admitted yet.
            first_block: number of whole blocks of its prompt on the device.

        Complexity: a hash of the tokens up to the first block that no tier holds.
        """
        first_block, run = self.find(request.namespace, request.tokens, first_block)
        request.reuse.stored_upto = (first_block + len(run)) * self._cache.block_size
        load = self._loads.get(run[0].block.key) if run else None
        if load is None:
            if not request.is_prefetch:
                run = self._choose(first_block, run)
            run = run[: self._num_free_blocks]
            run = self._usable_prefix(request.namespace, request.tokens, first_block, run)
            if not run:
                return False
            load = self._start(run)
        if self._cache.windows.pools:
            self._cache.touch(request.namespace, request.tokens)
        load.requests.add(request)
        self._pending[request] = _PendingRun(load, first_block, run)
        if not load.is_ended:
            self._waiting.add(request)
        return not load.is_ended

    def _choose(self, first_block: int, run: Sequence[StoredBlock]) -> Sequence[StoredBlock]:
        """Return the first blocks of a run, as many as can be loaded faster than they can be computed."""
        num_blocks = self._load_or_compute.choose(first_block * self._cache.block_size, [each.tier for each in run])
        self.num_computed_blocks.update(each.tier for each in run[num_blocks:])
        if not num_blocks:
            self._load_or_compute.shrink_estimates({each.tier for each in run})
        return run[:num_blocks]

    def find(self, namespace: Namespace, tokens: bytes, first_block: int) -> tuple[int, Sequence[StoredBlock]]:
        """Find the stored blocks that follow those on the device and from which a request can continue.

        Args:
            namespace, tokens: the prompt, in the form of the cache.
            first_block: number of whole blocks of the prompt on the device.

        Returns:
            The index of the first stored block, and the stored blocks. The index may be below `first_block` if the last
            blocks on the device lack their parts of windowed layers.
        """
        offload_index = self._index
        cache = self._cache
        run = self._usable_prefix(namespace, tokens, first_block, offload_index.find(namespace, tokens, first_block))
        if run or not cache.windows.pools:
            return first_block, run
        num_usable_blocks = cache.match(namespace, tokens).cached_tokens // cache.block_size
        earlier = max(num_usable_blocks, first_block - cache.windows.num_reached_blocks)
        if earlier >= first_block:
            return first_block, run
        return earlier, self._usable_prefix(namespace, tokens, earlier, offload_index.find(namespace, tokens, earlier))

    def take(self, request: Request, fetched: FetchedBlocks) -> None:
        """Make blocks that were fetched from another server the load of a request, so that `fill` copies them."""
        run = [StoredBlock(block, REMOTE) for block in fetched.blocks]
        payloads = zip(run, fetched.payloads, strict=True)
        blocks = {each.block.key: LoadedBlock(payload, Loan(payload)) for each, payload in payloads}
        load = Load(run, self._clock())
        load.end_call(REMOTE, LoadedBlocks(blocks, [], is_timed=False))
        load.requests.add(request)
        request.reuse.stored_upto = (fetched.first_block + len(run)) * self._cache.block_size
        self._pending[request] = _PendingRun(load, fetched.first_block, run, fetched)

    def ready(self) -> list[Request]:
        """Return the requests whose loads ended since the last call."""
        self._release_copied()
        ready: list[Request] = []
        while not self._ended.empty():
            load, tier, outcome, ended_s = self._ended.get()
            load.end_call(tier, outcome)
            num_blocks = len(load.keys_of(tier))
            self._load_or_compute.note_end(tier, num_blocks, ended_s - load.started_s if outcome.is_timed else None)
            self._index.lost(tier, outcome.lost)
            partless = [key for key, each in outcome.blocks.items() if not self._mover.has_part(each.payload)]
            if partless:
                self._index.note_partless(tier, partless)
            if load.is_ended:
                ready += load.requests & self._waiting
                self._drop_if_unused(load)
        self._waiting.difference_update(ready)
        return ready

    def has_load(self, request: Request) -> bool:
        """Whether a load for a request was started and not used yet."""
        return request in self._pending

    def fill(self, request: Request, lease: Lease) -> int:
        """Copy a request's loaded blocks into its lease's blocks, and publish them if the request writes the cache.

        `has_load` must be true, and the evicted contents of the lease's blocks must have been copied (`Saver.copy`). On
        a GPU this only launches the copies: steps that are launched later wait for them on the device, and the loans of
        the stores are held until the copies are complete.

        Returns:
            Number of tokens at the start of the prompt whose K and V exist for the following steps.
        """
        num_cached_tokens = lease.cached_tokens
        block_size = self._cache.block_size
        pending = self._pending[request]

        # The loaded blocks after those on the device, up to the last one from which the request can continue.
        ids_before = self._blocks_before(request, lease, pending.first_block)
        first_block = ids_before.size
        run = pending.run[first_block - pending.first_block :] if first_block >= pending.first_block else ()
        run = run[: pending.load.count_loaded(run)]
        payloads = [pending.load.blocks[each.block.key].payload for each in run]
        have_parts = [self._mover.has_part(payload) for payload in payloads]
        run = run[: self._num_usable(request.namespace, ids_before, have_parts)]
        payloads = payloads[: len(run)]
        end_block = first_block + len(run)
        if not run:
            self.leave(request)
            return num_cached_tokens

        copies = [self._mover.write(lease.block_ids[first_block:end_block].tolist(), payloads)]
        # Loaded blocks take the place of the partly cached block that would have been copied.
        lease.copy = None
        num_loaded = Counter(each.tier for each in run)
        num_tokens = {tier: num_blocks * block_size for tier, num_blocks in num_loaded.items()}
        # Tokens of the first block that were cached already do not count as loaded.
        num_tokens[run[0].tier] -= max(0, num_cached_tokens - first_block * block_size)
        if not request.has_computed:
            request.reuse.loaded_tokens = num_tokens
        if self._cache.ledger is not None:
            self._cache.ledger.load(request.tenant, num_tokens)

        if _publishes(request):
            lease.commit(end_block * block_size)
            self._index.loaded([each.block.key for each in run])
        copies += self._fill_parts(lease, first_block, payloads)
        self._filled.append((len(run), copies))
        pending.load.copies += copies
        self._note_filled()
        self.leave(request)
        return max(num_cached_tokens, end_block * block_size)

    @property
    def is_copying(self) -> bool:
        """Whether loans of stores are held until the device has copied the bytes."""
        return bool(self._copying)

    @property
    def is_loading(self) -> bool:
        """Whether loads have been started whose calls have not all ended."""
        return any(not load.is_ended for load in self._loads.values())

    @property
    def has_ended(self) -> bool:
        """Whether calls have ended since the last `ready`."""
        return not self._ended.empty()

    def leave(self, request: Request) -> None:
        """Forget a request. Blocks that were loaded for it alone are released."""
        pending = self._pending.pop(request, None)
        self._waiting.discard(request)
        if pending is not None:
            pending.load.requests.discard(request)
            self._drop_if_unused(pending.load)

    def forget(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Prevent the requests whose namespaces have these names, None for any, from using loaded blocks."""
        for request, pending in self._pending.items():
            if request.is_among(tenant, adapter, salt):
                request.reuse.stored_upto = 0
                self._pending[request] = pending._replace(run=())

    def close(self) -> None:
        """Release everything. Waits for copies to the device."""
        for request in list(self._pending):
            self.leave(request)
        for load in self._copying:
            for copy in load.copies:
                copy.wait()
        self._release_copied()

    def _usable_prefix(
        self, namespace: Namespace, tokens: bytes, first_block: int, run: Sequence[StoredBlock]
    ) -> Sequence[StoredBlock]:
        """Return the longest prefix of a run of stored blocks from which a request can continue."""
        if not run or not self._cache.windows.pools:
            return run
        block_ids = self._cache.found_blocks(namespace, tokens)[:first_block]
        if block_ids.size < first_block:  # the blocks follow a public prefix, all of whose parts are kept
            return run
        return run[: self._num_usable(namespace, block_ids, [each.has_part for each in run])]

    def _blocks_before(self, request: Request, lease: Lease, first_block: int) -> BlockIds:
        """Return the blocks on the device before those that were loaded.

        The lease excludes cached blocks after which no request can continue, because their parts were evicted. It
        adopts these blocks when it publishes the loaded blocks after them, because the tree already has them.
        """
        own = lease.block_ids[: lease.cached_tokens // self._cache.block_size]
        if own.size >= first_block or not _publishes(request) or lease.root_prefix.tokens:
            return own
        cached = self._cache.found_blocks(request.namespace, request.tokens)[:first_block]
        return cached if cached.size == first_block else own  # otherwise some were evicted in the meantime

    def _num_usable(self, namespace: Namespace, block_ids: BlockIds, have_part: Sequence[bool]) -> int:
        keeps_all = namespace.tenant == PUBLIC_TENANT
        return self._cache.windows.num_usable(block_ids, have_part, keeps_all=keeps_all)

    def _fill_parts(self, lease: Lease, first_block: int, payloads: Sequence[memoryview]) -> list[Copy]:
        """Copy the parts of windowed layers that a lease needs of the blocks from `first_block` on."""
        copies: list[Copy] = []
        for window_lease in lease.windows:
            indexes = window_lease.receive(lease.block_ids, first_block + len(payloads))
            part_ids = [window_lease.part_of(int(lease.block_ids[index])) for index in indexes]
            copies.append(self._mover.write_parts(part_ids, [payloads[index - first_block] for index in indexes]))
        return copies

    def _start(self, run: Sequence[StoredBlock]) -> Load:
        load = Load(run, self._clock())
        self._loads[run[0].block.key] = load
        self._num_free_blocks -= len(run)
        for tier in load.tiers:
            wanted = load.wanted_of(self._tiers[tier])
            self._load_or_compute.note_start(tier, len(wanted))
            future = self._tiers[tier].load(wanted)
            load.futures.append(future)
            future.add_done_callback(partial(self._queue_result, load, tier))
        return load

    def _queue_result(self, load: Load, tier: str, loaded: Future[list[LoadedBlock | Miss]]) -> None:
        """Queue the result of a call. Runs on the thread that ends the call: a store's, a timer's or the engine's."""
        blocks = LoadedBlocks.of(load.keys_of(tier), None if loaded.cancelled() else loaded.result())
        self._ended.put((load, tier, blocks, self._clock()))
        self._wake()

    def _drop_if_unused(self, load: Load) -> None:
        """Release a load that no request uses."""
        first_key = load.run[0].block.key if load.run else b""
        if load.requests or self._loads.get(first_key) is not load:
            return
        if load.is_ended:
            del self._loads[first_key]
            self._copying.append(load)
            self._release_copied()
        else:
            load.cancel()

    def _release_copied(self) -> None:
        """Release unused loads whose copies to the device are complete. Copies complete in the order of their start."""
        self._note_filled()
        while self._copying and all(copy.is_complete() for copy in self._copying[0].copies):
            load = self._copying.popleft()
            self._num_free_blocks += len(load.run)
            load.release()

    def _note_filled(self) -> None:
        """Record how long complete copies to the device took."""
        while self._filled and all(copy.is_complete() for copy in self._filled[0][1]):
            num_blocks, copies = self._filled.popleft()
            self._load_or_compute.note_fill(num_blocks, sum(copy.seconds() for copy in copies))


def _publishes(request: Request) -> bool:
    return request.params.write_cache and not request.is_revoked
