"""Values of another engine in radixkv's tiers: saved without waiting, verified when loaded, bounded, with quotas."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from radixkv.config.cache_directory import cache_directory
from radixkv.errors import StoreError
from radixkv.integrations.tiers.options import TierOptions
from radixkv.kernels.native.copies import NativeCopies
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat, BlockKeys, KeyScope
from radixkv.offload.disk_record import DiskRecord
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.index.tier_index import SharedTierIndex, StoreListener, TierIndex
from radixkv.offload.tiers.block_object import BlockObject, ObjectFault, Wanted
from radixkv.offload.tiers.block_store import PutOutcome, PutResult, StoreBackend
from radixkv.offload.tiers.disk import DiskStore
from radixkv.offload.tiers.guard import GuardedStore, TimerThread
from radixkv.offload.tiers.open_store import configured_stores, open_backend
from radixkv.offload.tiers.threaded_store import ThreadedStore
from radixkv.offload.tiers.tier import Absence, LoadedBlock, Miss, Tier
from radixkv.startup.tier_secrets import has_protection, mac_of, protection_of, secret_of, unprotected
from radixkv.tokens import TOKEN_BYTES

_log = logging.getLogger(__name__)

_SAVED_OUTCOMES = (PutOutcome.STORED, PutOutcome.ALREADY_THERE)
# Maximum number of remembered keys of a shared store. They take about 30 MB.
_MAX_KNOWN_KEYS = 1 << 18
# Loads are split into batches of this size. Each is read well within `load_limit_s`, and does not fill a store's queue.
_LOAD_BYTES = 64 << 20
_CLOSE_LIMIT_S = 30.0
_LAYOUT_BYTES = 16


def keyed_value(keys: BlockKeys, namespace: Namespace, name: bytes, layout: str = "") -> KeyedBlock:
    """Return the key of a value that an engine names itself, for example by a hash of tokens.

    Name and layout are stored with the value and compared when the value is loaded, so neither a collision of keys nor
    another layout can return other bytes.

    Args:
        keys: computes the key.
        namespace: the owner of the value. After a restart, the disk distinguishes owners by tenant, adapter and salt.
        name: distinguishes the value from other values of the namespace.
        layout: shapes and dtypes of the value. The key does not depend on them.
    """
    root = keys.root(namespace)
    digest = blake2b(layout.encode(), digest_size=_LAYOUT_BYTES).digest()
    identity = len(name).to_bytes(TOKEN_BYTES, "little") + name + digest
    identity += bytes(-len(identity) % TOKEN_BYTES)
    return KeyedBlock(keys.child(root, name), root, identity, namespace)


@dataclass(frozen=True, slots=True)
class _OpenTier:
    """A tier, the index of what it holds, and, for the disk, the record of its namespaces and its eviction order."""

    tier: Tier
    index: TierIndex
    record: DiskRecord | None


class ByteStore:
    """Values of one size in the configured tiers. Thread-safe.

        save ──▶ every tier that does not hold the value and has space for its tenant
        load ◀── the first tier that holds the value: host memory, disk, then Redis

    Only `purge` raises errors of stores, and only `purge`, `wait_for_writes` and `close` wait for stores: futures
    complete on the threads of the stores. A store that cannot be opened is logged and left out, and a load that fails
    counts as a miss.

    Args:
        options: the tiers, their secrets, and the shares of tenants.
        block_format: everything besides namespace and identity that determines the bytes of a value. A disk has one
            directory per format.
        keys: derives the keys of values, with the same secret as `options`; see `store_keys`.
        is_shared_only: whether to open only the stores that several processes share, to look up keys.

    Raises:
        ConfigError: an option is invalid, or a store is too small for one value.

    Attributes:
        block_format, keys: see above.
    """

    def __init__(
        self, options: TierOptions, block_format: BlockFormat, keys: BlockKeys, *, is_shared_only: bool = False
    ) -> None:
        self.block_format = block_format
        self.keys = keys
        self._lock = threading.RLock()  # guards the indexes and the counts
        self._counts: Counter[str] = Counter()
        self._max_waiting_bytes = int(options.max_waiting_bytes)
        self._waiting_bytes = 0
        self._num_deletions = 0  # calls that have not ended
        self._idle = threading.Condition(self._lock)
        self._timers = TimerThread()
        self._opened_tiers: list[_OpenTier] = []
        self._tiers = self._opened_tiers  # none after `close`
        try:
            for name, backend in _open_backends(options, block_format, is_shared_only=is_shared_only):
                self._opened_tiers.append(self._open_tier(name, backend, options))
        except BaseException:
            self.close()
            raise

    def save(self, values: Sequence[tuple[KeyedBlock, memoryview]]) -> Future[list[bool]]:
        """Save values in each tier that does not hold them.

        Args:
            values: keys, and contiguous buffers of `block_format.payload_bytes`, which must not change after this call.

        Returns:
            Whether each value is in at least one tier.
        """
        saved: Future[list[bool]] = Future()
        keys = [block.key for block, _ in values]
        calls: list[Future[PutResult | None]] = []
        for open_tier in self._tiers:
            admitted, victims = self._admit(open_tier, values)
            if admitted:
                objects = [self._object(open_tier.tier, *values[index]) for index in admitted]
                call = open_tier.tier.save(objects, victims)
                call.add_done_callback(partial(self._note_saved, open_tier, objects, victims))
                calls.append(call)
        call_when_done(calls, lambda: saved.set_result([self.holds(key) for key in keys]))
        return saved

    def load_into(self, values: Sequence[tuple[KeyedBlock, memoryview]]) -> Future[list[bool]]:
        """Load values into buffers. A value that is not found, or fails verification, leaves its buffer unchanged.

        Args:
            values: keys, and writable contiguous buffers of `block_format.payload_bytes`, which must be valid until
                the future is done.

        Returns:
            Whether each value was loaded.
        """
        batch_size = max(1, _LOAD_BYTES // self.block_format.payload_bytes)
        loaded = [False] * len(values)
        result: Future[list[bool]] = Future()

        def load(start: int) -> None:
            while start < len(values):
                calls: list[Future[list[LoadedBlock | Miss]]] = []
                are_done = True
                batch = range(start, min(start + batch_size, len(values)))
                for open_tier, indexes in self._divide_load(values, batch):
                    tier_values = [values[index] for index in indexes]
                    call = open_tier.tier.load([self._wanted(open_tier.tier, block) for block, _ in tier_values])
                    are_done = call.done() and are_done
                    call.add_done_callback(partial(self._note_loaded, open_tier, tier_values, indexes, loaded))
                    calls.append(call)
                start += batch_size
                if not are_done:  # if they are, the callbacks have run; a recursive call could exceed the stack
                    call_when_done(calls, partial(load, start))
                    return
            result.set_result(loaded)

        load(0)
        return result

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Mark values as used. Returns which of them every tier holds or is saving, so that they need no `save`."""
        is_everywhere = [True] * len(keys)
        for open_tier in self._tiers:
            with self._lock:
                is_held = [key in open_tier.index for key in keys]
                touched = [key for key, is_key_held in zip(keys, is_held, strict=True) if is_key_held]
                for key in touched:
                    open_tier.index.note_evicted(key)  # now the most recently used value
            is_everywhere = [everywhere and here for everywhere, here in zip(is_everywhere, is_held, strict=True)]
            if touched and open_tier.index.is_shared:
                open_tier.tier.touch(touched).add_done_callback(partial(self._note_touched, open_tier, touched))
        return is_everywhere

    def holds(self, key: bytes, *, is_local: bool = False) -> bool:
        """Whether a value can be loaded from a tier, as far as is known; from host memory or disk if `is_local`."""
        with self._lock:
            return any(each.index.holds(key) for each in self._tiers if not (is_local and each.index.is_shared))

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Return which values can be loaded. A shared store is queried for values that no tier is known to hold."""
        exists = [self.holds(key) for key in keys]
        result: Future[list[bool]] = Future()
        shared = next((each for each in self._tiers if each.index.is_shared), None)
        unknown = [index for index, is_held in enumerate(exists) if not is_held]
        if shared is None or not unknown:
            result.set_result(exists)
            return result

        def add_answer(future: Future[list[bool] | None]) -> None:
            for index, is_stored in zip(unknown, future.result() or [], strict=False):
                exists[index] = is_stored
            result.set_result(exists)

        shared.tier.exists([keys[index] for index in unknown]).add_done_callback(add_answer)
        return result

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete values from all tiers, without waiting."""
        for open_tier in self._tiers:
            with self._lock:
                for key in keys:
                    open_tier.index.remove(key)
            self._delete(open_tier.tier, keys)

    def purge(self, scope: KeyScope, limit_s: float) -> None:
        """Delete the values in host memory and on disk whose keys are in a scope, including those that are being saved.

        Meanwhile, no other thread may save values in the scope.

        Args:
            scope: which keys.
            limit_s: time limit for the saves that run, and for the deletion in each tier.

        Raises:
            StoreError: a tier did not delete its values. They are no longer loaded, but may be loaded after a restart.
        """
        self.wait_for_writes(limit_s)
        failed: list[str] = []
        for each in self._tiers:
            if each.index.is_shared:
                continue
            with self._lock:
                keys = [key for key in each.index if scope.has(key)]
                for key in keys:
                    each.index.remove(key)
            try:
                is_deleted = self._delete(each.tier, keys).result(limit_s) is not None
            except TimeoutError:
                is_deleted = False
            if not is_deleted:
                failed.append(each.tier.name)
        if failed:
            raise StoreError(f"tier {', '.join(failed)}: values were not deleted, and may be found after a restart")

    def local_keys(self) -> set[bytes]:
        """Return the keys of the values in host memory and on disk. Complexity: O(keys)."""
        with self._lock:
            indexes = [each.index for each in self._tiers if not each.index.is_shared]
            return {key for index in indexes for key in index if index.holds(key)}

    def subscribe(self, listener: StoreListener) -> None:
        """Notify a listener, on any thread, of the values that host memory and disk hold from now on."""
        with self._lock:
            for each in self._tiers:
                if not each.index.is_shared:
                    each.index.subscribe(listener)

    def counts(self) -> dict[str, int]:
        """Return counts since the start.

        `loaded` and `missed` count values. The other counts are sums over the tiers: `saved` and `evicted` values;
        values that were not saved, because a quota or the capacity left no space (`refused`), too many bytes waited
        (`dropped`), their size was wrong (`wrong_size`) or the save failed (`failed`); and the misses of each tier by
        reason, such as `disk_damaged`.
        """
        with self._lock:
            counts = Counter(self._counts)
        for each in self._opened_tiers:
            tier = each.tier.counts()
            counts["loaded"] += tier.loaded
            counts["failed"] += tier.failed_saves
            counts["evicted"] += tier.evicted
            counts["saved"] += tier.saved.get(PutOutcome.STORED, 0)
            counts.update({f"{each.tier.name}_{reason.value}": number for reason, number in tier.misses.items()})
        return dict(counts)

    @property
    def num_values(self) -> dict[str, int]:
        """Number of values by tier, as far as is known."""
        with self._lock:
            return {each.tier.name: len(each.index) for each in self._tiers}

    def num_values_of_tenants(self) -> dict[str, int]:
        """Return the number of values of each tenant in the tier of this process that holds the most values."""
        with self._lock:
            local = [each.index.owned for each in self._tiers if not each.index.is_shared]
            return dict(max(local, key=len).num_by_tenant) if local else {}

    def wait_for_writes(self, limit_s: float) -> bool:
        """Wait until no value waits to be written or deleted. Returns whether that was within the limit."""
        with self._idle:
            return self._idle.wait_for(lambda: not (self._waiting_bytes or self._num_deletions), limit_s)

    def close(self) -> None:
        """Write and delete what is waiting, and close the stores. Closing again does nothing."""
        if not self.wait_for_writes(_CLOSE_LIMIT_S):
            _log.warning(
                "tiers: %d bytes were not written, and %d deletions not made, within %g s",
                self._waiting_bytes,
                self._num_deletions,
                _CLOSE_LIMIT_S,
            )
        with self._lock:
            closing, self._tiers = self._tiers, []
        for each in closing:
            try:
                each.tier.close()
            except StoreError as error:
                _log.error("tier %s: closing failed: %s", each.tier.name, error)
        self._timers.close()

    def _open_tier(self, name: str, backend: StoreBackend, options: TierOptions) -> _OpenTier:
        is_shared = backend.size().max_objects is None
        store = GuardedStore(
            name,
            ThreadedStore(backend, name=name),
            self._timers,
            is_known=not is_shared,
            limit_s=options.load_limit_s,
        )
        tier = Tier(
            name,
            store,
            self.block_format.payload_bytes,
            store.is_working,
            unprotected if name == "host" else protection_of(options.tiers, mac_of(options.tiers, self.block_format)),
            is_shared=is_shared,
        )
        if is_shared:
            return _OpenTier(tier, SharedTierIndex(name, _MAX_KNOWN_KEYS), None)
        index = TierIndex(name, backend.size().max_objects or 0, shares_of=options.shares_of)
        if not isinstance(backend, DiskStore):
            return _OpenTier(tier, index, None)
        record = DiskRecord(backend, self.keys, rejected=tier.rejected)
        recorded = record.read()
        left_out = index.add_found(reversed(recorded.blocks))
        if left_out:
            tier.delete(left_out)
        _log.info("tier disk: %d values of an earlier process in %s", len(index), backend.path)
        return _OpenTier(tier, index, record)

    def _admit(
        self, open_tier: _OpenTier, values: Sequence[tuple[KeyedBlock, memoryview]]
    ) -> tuple[list[int], list[bytes]]:
        """Decide which values a tier saves, and add them to its index.

        Returns:
            The indexes of these values, and the keys that the tier evicts for them.
        """
        admitted: list[int] = []
        victims: list[bytes] = []
        with self._lock:
            for index, (block, payload) in enumerate(values):
                tenant = block.namespace.tenant
                if block.key in open_tier.index:
                    continue
                if payload.nbytes != self.block_format.payload_bytes:
                    self._counts["wrong_size"] += 1
                elif self._waiting_bytes + payload.nbytes > self._max_waiting_bytes:
                    self._counts["dropped"] += 1
                elif not open_tier.index.has_room_for(tenant):
                    self._counts["refused"] += 1
                else:
                    victim = open_tier.index.add(block.key, block.namespace)
                    victims += [] if victim is None else [victim]
                    if open_tier.record is not None:
                        open_tier.record.note(block.namespace)
                        open_tier.record.tidy(open_tier.index.owned)
                    self._waiting_bytes += payload.nbytes
                    admitted.append(index)
        return admitted, victims

    def _object(self, tier: Tier, block: KeyedBlock, payload: memoryview) -> BlockObject:
        protection = tier.protection_of(block.namespace.tenant)
        return BlockObject(block.key, block.parent, 0, block.tokens, payload, protection)

    def _wanted(self, tier: Tier, block: KeyedBlock) -> Wanted:
        return Wanted(block.key, block.tokens, tier.protection_of(block.namespace.tenant))

    def _note_saved(
        self,
        open_tier: _OpenTier,
        objects: Sequence[BlockObject],
        victims: Sequence[bytes],
        future: Future[PutResult | None],
    ) -> None:
        result = future.result()
        with self._lock:
            outcomes = (None,) * len(objects) if result is None else result.outcomes
            for saved, outcome in zip(objects, outcomes, strict=True):
                if outcome in _SAVED_OUTCOMES:
                    open_tier.index.note_stored(saved.key)
                else:
                    open_tier.index.remove(saved.key)
            for key in () if result is None else result.evicted:
                if open_tier.index.holds(key):  # otherwise it is being saved again
                    open_tier.index.remove(key)
            unindexed = [saved.key for saved in objects if saved.key not in open_tier.index]
            unindexed += [key for key in victims if key not in open_tier.index]
        if unindexed and not open_tier.index.is_shared:
            # The store may hold some of them, if the call failed, or evicted other keys than the victims.
            self._delete(open_tier.tier, unindexed)
        with self._idle:
            self._waiting_bytes -= sum(saved.payload.nbytes for saved in objects)
            self._idle.notify_all()

    def _delete(self, tier: Tier, keys: Sequence[bytes]) -> Future[int | None]:
        with self._lock:
            self._num_deletions += 1
        deletion = tier.delete(keys)
        deletion.add_done_callback(self._note_deleted)
        return deletion

    def _note_deleted(self, _: Future[int | None]) -> None:
        with self._idle:
            self._num_deletions -= 1
            self._idle.notify_all()

    def _note_touched(self, open_tier: _OpenTier, keys: Sequence[bytes], future: Future[list[bool] | None]) -> None:
        with self._lock:
            for key, is_there in zip(keys, future.result() or [], strict=False):
                if not is_there and open_tier.index.holds(key):
                    open_tier.index.remove(key)  # the next save writes it again

    def _divide_load(
        self, values: Sequence[tuple[KeyedBlock, memoryview]], indexes: range
    ) -> list[tuple[_OpenTier, list[int]]]:
        """Divide a load among the tiers. Returns, for each tier, the indexes of the values to load from it."""
        indexes_by_tier: dict[int, list[int]] = defaultdict(list)
        with self._lock:
            for index in indexes:
                key = values[index][0].key
                number = next((number for number, each in enumerate(self._tiers) if each.index.holds(key)), None)
                if number is None:  # a shared store may hold values that its index does not have
                    number = next((number for number, each in enumerate(self._tiers) if each.index.is_shared), None)
                if number is None:
                    self._counts["missed"] += 1
                else:
                    indexes_by_tier[number].append(index)
            return [(self._tiers[number], tier_indexes) for number, tier_indexes in indexes_by_tier.items()]

    def _note_loaded(
        self,
        open_tier: _OpenTier,
        values: Sequence[tuple[KeyedBlock, memoryview]],
        indexes: Sequence[int],
        loaded: list[bool],
        future: Future[list[LoadedBlock | Miss]],
    ) -> None:
        for index, (block, target), result in zip(indexes, values, future.result(), strict=True):
            if isinstance(result, LoadedBlock):
                with result.loan:
                    np.frombuffer(target, np.uint8)[:] = np.frombuffer(result.payload, np.uint8)
                loaded[index] = True
                with self._lock:
                    self._note_read(open_tier, block)
                continue
            with self._lock:
                self._counts["missed"] += 1
                is_gone = result is Absence.ABSENT or isinstance(result, ObjectFault)
                if is_gone and open_tier.index.holds(block.key):
                    open_tier.index.remove(block.key)

    def _note_read(self, open_tier: _OpenTier, block: KeyedBlock) -> None:
        if block.key in open_tier.index:
            open_tier.index.note_evicted(block.key)  # now the most recently used value
        elif open_tier.index.is_shared:
            open_tier.index.add(block.key, block.namespace)
            open_tier.index.note_stored(block.key)


def call_when_done(futures: Sequence[Future[Any]], function: Callable[[], None]) -> None:
    """Call a function once when all futures are done, after their present callbacks, even if these raise.

    The function is called at once if all futures are done, otherwise on the thread that completes the last one.
    """
    lock = threading.Lock()
    num_pending = len(futures)

    def count(_: Future[Any]) -> None:
        nonlocal num_pending
        with lock:
            num_pending -= 1
            is_last = not num_pending
        if is_last:
            function()

    if not futures:
        function()
    for future in futures:
        future.add_done_callback(count)


def store_keys(options: TierOptions, block_format: BlockFormat) -> BlockKeys:
    """Return the object that computes the keys of values of a format.

    Raises:
        ConfigError: the file of the secret can't be read, or is too short.
    """
    return BlockKeys(block_format, secret_of(options.tiers))


def _open_backends(
    options: TierOptions, block_format: BlockFormat, *, is_shared_only: bool
) -> Iterator[tuple[str, StoreBackend]]:
    tiers = options.tiers
    if is_shared_only:
        tiers = replace(tiers, host_bytes=None, disk_path=None)
    native = None if is_shared_only else _native_copies()
    must_be_private = not (has_protection(tiers) or tiers.trusted)
    configured = configured_stores(tiers, {}, block_format, native, must_be_private=must_be_private)
    for name, store_options in configured.items():
        try:
            yield name, open_backend(name, store_options)
        except StoreError as error:
            _log.error("tier %s is off: %s", name, error)


def _native_copies() -> NativeCopies | None:
    """Return copies in C++; None if the kernels are not installed and cannot be compiled, or torch is missing."""
    try:
        from radixkv.kernels.native.compiler import NotCompiled
        from radixkv.kernels.native.library import load_library
    except ImportError:
        return None
    try:
        return NativeCopies(load_library(cache_directory()))
    except NotCompiled as reason:
        _log.info("tiers: copies in Python, since there are no compiled kernels: %s", reason)
        return None
