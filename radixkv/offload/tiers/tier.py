"""One tier as the engine uses it: blocks in, verified blocks out, and counts of everything else."""

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
from radixkv.offload.tiers.block_object import BlockObject, ObjectFault, Wanted, open_object
from radixkv.offload.tiers.block_store import BlockStore, Loan, PutOutcome, PutResult, StoreSize
from radixkv.offload.tiers.sealing import BlockCipher, TenantCiphers

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_U = TypeVar("_U")


class Absence(enum.Enum):
    """Reason why a store gave nothing."""

    ABSENT = "absent"
    BUSY = "busy"
    LATE = "late"
    UNAVAILABLE = "unavailable"


Miss = Absence | ObjectFault


class LoadedBlock(NamedTuple):
    """K and V of a block, verified.

    Attributes:
        payload: its bytes, read-only.
        loan: keeps them; released once they are copied.
    """

    payload: memoryview
    loan: Loan


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts since the start.

    Attributes:
        loaded: blocks that were found and are whole.
        loaded_bytes: their payloads.
        load_s: seconds from a call to its answer, of all calls that were answered.
        misses: blocks that were not, by reason.
        saved: objects by what became of them; those of failed calls are in `failed_saves`.
        failed_saves: objects of calls that failed.
        evicted: objects that left to make room.
    """

    loaded: int
    loaded_bytes: int
    load_s: float
    misses: dict[Miss, int]
    saved: dict[PutOutcome, int]
    failed_saves: int
    evicted: int


class Tier:
    """A store of one format's blocks. Nothing that it returns is wrong; whatever is wrong is a counted miss.

    Calls return at once. Futures never fail: a store that does is a miss, or an object that was not stored. They are
    cancelled like those of `BlockStore`.

    Args:
        name: `host`, `disk`, `redis`, `mooncake`, or a plug-in's.
        store: where objects go. It is closed with the tier.
        payload_bytes: bytes of K and V of a block, or all sizes that it may have; an object of another one is foreign.
        is_working: tells whether the store is used, or left alone for a while.
        ciphers: seal what is stored; None stores it in the clear.
        stage: called on the store's thread with each loaded payload. Returns a copy in pinned memory, in place of which
            the store's loan ends; None to keep the payload where the store lends it.
        is_shared: whether other servers use the store as well.

    Attributes:
        name, is_working: see above.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        payload_bytes: int | Sequence[int],
        is_working: Callable[[], bool] = lambda: True,
        ciphers: TenantCiphers | None = None,
        *,
        stage: Callable[[memoryview], memoryview | None] = lambda payload: None,
        is_shared: bool = False,
    ) -> None:
        self.name = name
        self.is_working = is_working
        self._ciphers = ciphers
        self._stage = stage
        self._is_shared = is_shared
        self._store = store
        self._payload_bytes = (payload_bytes,) if isinstance(payload_bytes, int) else tuple(payload_bytes)
        self._lock = threading.Lock()
        self._loaded = self._loaded_bytes = self._failed_saves = self._evicted = 0
        self._load_s = 0.0
        self._misses: Counter[Miss] = Counter()
        self._saved: Counter[PutOutcome] = Counter()

    def cipher_of(self, tenant: str) -> BlockCipher | None:
        """Return what seals the objects of a tenant; None if they are stored in the clear."""
        return None if self._ciphers is None else self._ciphers.of(tenant)

    def save(self, objects: Sequence[BlockObject], give_up: Sequence[bytes] = ()) -> Future[PutResult | None]:
        """Store blocks; see `BlockStore.put`. The result is None if the store failed and may have some of them."""

        def saved(result: PutResult) -> PutResult:
            self._require_answers(result.outcomes, len(objects))
            with self._lock:
                self._saved.update(result.outcomes)
                self._evicted += len(result.evicted)
            return result

        def failed(error: StoreError) -> PutResult | None:
            with self._lock:
                self._failed_saves += len(objects)
            was_asked = not isinstance(error, StoreBusy | StorePaused)
            return None if was_asked else PutResult((PutOutcome.NOT_ASKED,) * len(objects))

        return _then(self._store.put(objects, give_up), saved, failed)

    def load(self, wanted: Sequence[Wanted]) -> Future[list[LoadedBlock | Miss]]:
        """Return each wanted block, or why not. They are verified on the store's thread.

        What is there and can't be used is deleted, so that it is not read again; but in a shared store not what another
        server may have sealed with its own key.
        """

        start_s = time.monotonic()

        def opened(loans: list[Loan | None]) -> list[LoadedBlock | Miss]:
            found = [self._open(loan, each) for loan, each in zip(loans, wanted, strict=True)]
            faults = [index for index, each in enumerate(found) if isinstance(each, ObjectFault)]
            if useless := [wanted[index].key for index in faults if self._is_useless(found[index])]:
                self._store.delete(useless)
            with self._lock:
                self._load_s += time.monotonic() - start_s
            return self._count(found)

        def failed(error: StoreError) -> list[LoadedBlock | Miss]:
            return self._count([_reason_of(error)] * len(wanted))

        return _then(self._store.get([each.key for each in wanted]), opened, failed, _release_all)

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool] | None]:
        """Return whether something is stored under each key; None if the store could not be asked.

        It may turn out to be no use when it is loaded.
        """

        def known(found: list[bool]) -> list[bool]:
            self._require_answers(found, len(keys))
            return found

        return _then(self._store.exists(keys), known, lambda _: None)

    def delete(self, keys: Sequence[bytes]) -> Future[int | None]:
        """Forget blocks. Return the number of those that were there, None if the store could not be asked."""
        return _then(self._store.delete(keys), lambda number: number, lambda _: None)

    def purge(self, scope: KeyScope) -> Future[int | None]:
        """Forget what a shared store holds under such keys. Return as `delete` does."""
        return _then(self._store.purge(scope), lambda number: number, lambda _: None)

    def size(self) -> StoreSize:
        """Return what the store holds."""
        return self._store.size()

    def counts(self) -> TierCounts:
        """Return the counts."""
        with self._lock:
            misses, saved = dict(self._misses), dict(self._saved)
            loaded = (self._loaded, self._loaded_bytes, self._load_s)
            return TierCounts(*loaded, misses, saved, self._failed_saves, self._evicted)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _require_answers(self, answers: Sequence[object], num_expected: int) -> None:
        """Refuse what no store should return, but a plug-in may."""
        if len(answers) != num_expected:
            message = f"store {self.name}: expected {num_expected} answers in one call, got {len(answers)}"
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

    def _is_useless(self, fault: LoadedBlock | Miss) -> bool:
        return not (self._is_shared and fault is ObjectFault.UNSEALED)

    def _count(self, found: list[LoadedBlock | Miss]) -> list[LoadedBlock | Miss]:
        blocks = [each for each in found if isinstance(each, LoadedBlock)]
        with self._lock:
            self._loaded += len(blocks)
            self._loaded_bytes += sum(block.payload.nbytes for block in blocks)
        if len(blocks) == len(found):
            return found
        misses = Counter(each for each in found if not isinstance(each, LoadedBlock))
        with self._lock:
            is_first = {fault for fault in misses if isinstance(fault, ObjectFault) and not self._misses[fault]}
            self._misses.update(misses)
        for fault in is_first:
            _log.warning("tier %s: expected whole blocks of this model, got one that is %s", self.name, fault.value)
        return found


def _reason_of(error: StoreError) -> Absence:
    return {StoreBusy: Absence.BUSY, StoreLate: Absence.LATE}.get(type(error), Absence.UNAVAILABLE)


def _release_all(loans: list[Loan | None]) -> None:
    for loan in loans:
        if loan is not None:
            loan.release()


def _then(
    inner: Future[_T],
    convert: Callable[[_T], _U],
    failed: Callable[[StoreError], _U],
    unwanted: Callable[[_T], None] = lambda _: None,
) -> Future[_U]:
    """Return a future of the converted result, of what `failed` makes of an error if there is none.

    Cancelling it cancels `inner`, whose result is then `unwanted`.
    """
    outer: Future[_U] = Future()
    pending = [inner]  # empty in the end, so that the two leave the collector no circle

    def forward(done: Future[_T]) -> None:
        pending.clear()
        is_wanted = outer.set_running_or_notify_cancel()
        try:
            result = done.result()
            if is_wanted:
                outer.set_result(convert(result))
            else:
                unwanted(result)
        except (StoreError, CancelledError) as error:
            if is_wanted:
                known = error if isinstance(error, StoreError) else StoreClosed("store: the call was cancelled")
                outer.set_result(failed(known))
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody must wait forever
            _log.exception("store: expected an answer that can be used")
            if is_wanted:
                outer.set_result(failed(StoreUnavailable(f"store: expected an answer, got {type(error).__name__}")))

    def cancel(done: Future[_U]) -> None:
        if done.cancelled():
            for each in tuple(pending):
                each.cancel()

    outer.add_done_callback(cancel)
    inner.add_done_callback(forward)
    return outer
