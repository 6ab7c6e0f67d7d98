"""The interface of one tier for the engine: stores blocks, loads and verifies them, and counts the outcomes."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from radixkv.errors import StoreBusy, StoreClosed, StoreError, StoreLate, StorePaused, StoreUnavailable
from radixkv.offload.block_keys import KeyScope
from radixkv.offload.tiers.block_object import BlockObject, ObjectFault, Protection, Wanted, open_object
from radixkv.offload.tiers.block_store import BlockStore, Loan, PutOutcome, PutResult, StoreSize
from radixkv.offload.tiers.rejected_blocks import RejectedBlocks

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_U = TypeVar("_U")


class Absence(enum.Enum):
    """Reason why a store returned no object."""

    ABSENT = "absent"
    BUSY = "busy"
    LATE = "late"
    UNAVAILABLE = "unavailable"


Miss = Absence | ObjectFault


class LoadedBlock(NamedTuple):
    """K and V of a block, verified.

    Attributes:
        payload: its bytes, read-only.
        loan: keeps the bytes valid; release it as soon as they are copied.
    """

    payload: memoryview
    loan: Loan


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts since the start.

    Attributes:
        loaded: blocks that were loaded and verified.
        loaded_bytes: bytes of their payloads.
        load_s: total seconds from a call to its result, over all calls that did not fail.
        misses: blocks that were not loaded, by reason.
        saved: objects by outcome, except those of failed calls.
        failed_saves: objects of calls that failed.
        evicted: objects that were evicted to make room.
    """

    loaded: int
    loaded_bytes: int
    load_s: float
    misses: dict[Miss, int]
    saved: dict[PutOutcome, int]
    failed_saves: int
    evicted: int


class Tier:
    """A store of blocks of one format. It verifies every block that it returns, and counts invalid ones as misses.

    Calls return immediately. Futures never fail: if the store fails, the result is a miss, or None, or says that
    nothing was stored. Cancelling a future has the same effect as for `BlockStore`.

    Args:
        name: `host`, `disk`, `redis`, `mooncake`, or the name of a plug-in.
        store: stores the objects. It is closed with the tier.
        payload_bytes: bytes of K and V of a block, or all valid sizes. An object with another payload size is a miss,
            `ObjectFault.FOREIGN`.
        is_working: returns whether the store is in use; false unless its circuit breaker is closed.
        protection_of: returns the encryption or MAC of a tenant's objects; None if only this process can write them, or
            the store is trusted.
        stage: called on the store's thread with each loaded payload. Returns a copy in pinned memory, after which the
            loan of the store is released; None to use the payload where the store lends it.
        is_shared: whether other servers use the store as well.

    Attributes:
        name, is_working, protection_of: see above.
        rejected: the blocks that failed verification.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        payload_bytes: int | Sequence[int],
        is_working: Callable[[], bool] = lambda: True,
        protection_of: Callable[[str], Protection | None] = lambda tenant: None,
        *,
        stage: Callable[[memoryview], memoryview | None] = lambda payload: None,
        is_shared: bool = False,
    ) -> None:
        self.name = name
        self.is_working = is_working
        self.protection_of = protection_of
        self._stage = stage
        self._is_shared = is_shared
        self._store = store
        self._payload_bytes = (payload_bytes,) if isinstance(payload_bytes, int) else tuple(payload_bytes)
        self._lock = threading.Lock()
        self._loaded = self._loaded_bytes = self._failed_saves = self._evicted = 0
        self._load_s = 0.0
        self._absences: Counter[Miss] = Counter()
        self.rejected = RejectedBlocks(f"tier {name}")
        self._saved: Counter[PutOutcome] = Counter()

    def save(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> Future[PutResult | None]:
        """Store blocks; see `BlockStore.put`.

        If the store is busy or paused, all outcomes are `NOT_SENT`. If the call fails otherwise, perhaps after storing
        some of the blocks, the result is None.
        """

        def count_saved(result: PutResult) -> PutResult:
            self._require_results(result.outcomes, len(objects))
            with self._lock:
                self._saved.update(result.outcomes)
                self._evicted += len(result.evicted)
            return result

        def count_failed(error: StoreError) -> PutResult | None:
            with self._lock:
                self._failed_saves += len(objects)
            may_have_reached_store = not isinstance(error, StoreBusy | StorePaused)
            return None if may_have_reached_store else PutResult((PutOutcome.NOT_SENT,) * len(objects))

        return _then(self._store.put(objects, victims), count_saved, count_failed)

    def load(self, wanted: Sequence[Wanted]) -> Future[list[LoadedBlock | Miss]]:
        """Load blocks. The result has each block, or the reason for its miss. Verification runs on the store's thread.

        Objects that cannot be used are deleted, so that they are not read again, except objects in a shared store that
        another server may have encrypted with its own key.
        """
        start_s = time.monotonic()

        def open_loans(loans: list[Loan | None]) -> list[LoadedBlock | Miss]:
            results = [self._open(loan, each) for loan, each in zip(loans, wanted, strict=True)]
            useless = [
                block.key
                for block, result in zip(wanted, results, strict=True)
                if isinstance(result, ObjectFault) and self._is_useless(result)
            ]
            if useless:
                self._store.delete(useless)
            with self._lock:
                self._load_s += time.monotonic() - start_s
            return self._count(results)

        def miss_all(error: StoreError) -> list[LoadedBlock | Miss]:
            return self._count([_reason_of(error)] * len(wanted))

        return _then(self._store.get([each.key for each in wanted]), open_loans, miss_all, _release_loans)

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool] | None]:
        """Return whether an object is stored under each key; None if the call fails.

        An object that exists may still fail verification when it is loaded.
        """
        return self._results_per_key(self._store.exists(keys), len(keys))

    def touch(self, keys: Sequence[bytes]) -> Future[list[bool] | None]:
        """Mark blocks of a shared store as used. Returns the same as `exists`."""
        return self._results_per_key(self._store.touch(keys), len(keys))

    def delete(self, keys: Sequence[bytes]) -> Future[int | None]:
        """Delete blocks. Return the number of deleted blocks, None if the call fails."""
        return _then(self._store.delete(keys), lambda number: number, lambda _: None)

    def purge(self, scope: KeyScope) -> Future[int | None]:
        """Delete all blocks of a shared store whose keys are in a scope. Returns the same as `delete`."""
        return _then(self._store.purge(scope), lambda number: number, lambda _: None)

    def size(self) -> StoreSize:
        """Return the size of the store and its capacity."""
        return self._store.size()

    def counts(self) -> TierCounts:
        """Return the counts."""
        with self._lock:
            misses = self._absences | Counter[Miss](self.rejected.counts())
            saved = dict(self._saved)
            loaded = (self._loaded, self._loaded_bytes, self._load_s)
            return TierCounts(*loaded, misses, saved, self._failed_saves, self._evicted)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _results_per_key(self, call: Future[list[bool]], num_keys: int) -> Future[list[bool] | None]:
        """Return a future of the results of a call, one for each key; None if the call fails."""

        def check(are_there: list[bool]) -> list[bool]:
            self._require_results(are_there, num_keys)
            return are_there

        return _then(call, check, lambda _: None)

    def _require_results(self, results: Sequence[object], num_expected: int) -> None:
        """Raise if the number of results is wrong, which is possible with a plug-in."""
        if len(results) != num_expected:
            message = f"store {self.name}: expected {num_expected} results from one call, got {len(results)}"
            _log.error(message)
            raise StoreUnavailable(message)

    def _open(self, loan: Loan | None, wanted: Wanted) -> LoadedBlock | Miss:
        if loan is None:
            return Absence.ABSENT
        payload = open_object(loan.data, wanted, *self._payload_bytes, checksum=loan.checksum)
        if isinstance(payload, ObjectFault):
            loan.release()
            return payload
        staged = self._stage(payload)
        if staged is not None:
            loan.release()
            return LoadedBlock(staged.toreadonly(), Loan(staged))
        return LoadedBlock(payload if payload.readonly else payload.toreadonly(), loan)

    def _is_useless(self, fault: ObjectFault) -> bool:
        """Whether an object with a fault is deleted; see `load`."""
        return not (self._is_shared and fault is ObjectFault.UNSEALED)

    def _count(self, results: list[LoadedBlock | Miss]) -> list[LoadedBlock | Miss]:
        blocks = [each for each in results if isinstance(each, LoadedBlock)]
        with self._lock:
            self._loaded += len(blocks)
            self._loaded_bytes += sum(block.payload.nbytes for block in blocks)
        if len(blocks) == len(results):
            return results
        with self._lock:
            self._absences.update(each for each in results if isinstance(each, Absence))
        self.rejected.add(each for each in results if isinstance(each, ObjectFault))
        return results


def _reason_of(error: StoreError) -> Absence:
    return {StoreBusy: Absence.BUSY, StoreLate: Absence.LATE}.get(type(error), Absence.UNAVAILABLE)


def _release_loans(loans: list[Loan | None]) -> None:
    for loan in loans:
        if loan is not None:
            loan.release()


def _then(
    inner: Future[_T],
    convert: Callable[[_T], _U],
    convert_error: Callable[[StoreError], _U],
    discard: Callable[[_T], None] = lambda _: None,
) -> Future[_U]:
    """Return a future of `convert(result)`, or of `convert_error(error)` if there is no result or `convert` raises.

    Cancelling the future cancels `inner`. If `inner` has a result anyway, `discard` is called with the result.
    """
    outer: Future[_U] = Future()
    pending = [inner]  # emptied at the end, so that no reference cycle remains

    def forward(done: Future[_T]) -> None:
        pending.clear()
        is_wanted = outer.set_running_or_notify_cancel()
        try:
            result = done.result()
            if is_wanted:
                outer.set_result(convert(result))
            else:
                discard(result)
        except (StoreError, CancelledError) as error:
            if is_wanted:
                store_error = error if isinstance(error, StoreError) else StoreClosed("store: the call was cancelled")
                outer.set_result(convert_error(store_error))
        except Exception as error:  # noqa: BLE001 - no caller may wait forever
            _log.exception("store: the result of a call can't be used")
            if is_wanted:
                outer.set_result(
                    convert_error(StoreUnavailable(f"store: expected an answer, got {type(error).__name__}"))
                )

    def cancel(done: Future[_U]) -> None:
        if done.cancelled():
            for each in tuple(pending):
                each.cancel()

    outer.add_done_callback(cancel)
    inner.add_done_callback(forward)
    return outer
