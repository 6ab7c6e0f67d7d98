"""The interface of stores: `BlockStore` for callers, and `StoreBackend` for authors of stores.

Tier ──▶ GuardedStore ──▶ ThreadedStore ──▶ StoreBackend: host memory, disk, Redis, Mooncake, a plug-in
         BlockStore        BlockStore        synchronous, called on its own threads
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from radixkv.offload.block_keys import KeyScope
from radixkv.offload.tiers.block_object import BlockObject


class PutOutcome(enum.Enum):
    """Outcome of storing one object."""

    STORED = "stored"
    ALREADY_THERE = "already_there"  # an object of this or a later generation has the key
    NO_ROOM = "no_room"
    TOO_LARGE = "too_large"  # for any slot, so retrying is useless
    NOT_SENT = "not_sent"  # the call never reached the store


@dataclass(frozen=True, slots=True)
class PutResult:
    """Outcomes of storing the objects of one batch.

    Attributes:
        outcomes: one for each object.
        evicted: keys that were evicted to make room.
    """

    outcomes: tuple[PutOutcome, ...]
    evicted: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreSize:
    """The contents and the capacity of a store.

    Attributes:
        num_objects: stored objects; None if only a server knows.
        used_bytes: bytes that they take; None if only a server knows.
        capacity_bytes: bytes that they may take; None if another program limits them.
        max_objects: number of objects that fit; None if that is not known.
    """

    num_objects: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    max_objects: int | None = None


class Loan:
    """The bytes of one object, lent by a store, which does not reuse them before the loan is released.

    `release` or the end of a `with` statement releases the loan, and so does garbage collection, so that an abandoned
    result holds no memory.

    Attributes:
        data: the object as it was stored; read-only. Must not be accessed after the release.
        checksum: `checksum_of` these bytes if the store computed it while reading; None if not.
    """

    __slots__ = ("_on_release", "checksum", "data")

    def __init__(
        self, data: memoryview, on_release: Callable[[], None] | None = None, checksum: bytes | None = None
    ) -> None:
        self.data = data.toreadonly()
        self.checksum = checksum
        self._on_release = on_release

    def release(self) -> None:
        """Release the loan. Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class BlockStore(Protocol):
    """The interface of a store for callers: calls return immediately; futures complete on any thread.

    Cancelling a future before its call has started prevents the call. Calls fail with `StoreError`: busy, late,
    paused, unreachable, closed. Objects are those of `BlockObject`; callers verify them.
    """

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> Future[PutResult]:
        """Store objects.

        Args:
            objects: their payloads must never change after this call.
            victims: keys to evict first, in this order, if space is needed. Objects that are being read are not
                evicted; if the next victim is being read, the new object is not stored. After the victims, the least
                recently used objects are evicted.
        """

    def get(self, keys: Sequence[bytes]) -> Future[list[Loan | None]]:
        """Return the object under each key, or None."""

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Return whether there is an object under each key."""

    def touch(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Mark the objects of a shared store as used, the last one most recently; see `StoreBackend.touch`."""

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Delete objects. Return the number of those that existed."""

    def purge(self, scope: KeyScope) -> Future[int]:
        """Delete all objects of a shared store whose keys are in a scope. Return their number."""

    def size(self) -> StoreSize:
        """Return the contents and the capacity, without waiting."""

    def close(self) -> None:
        """Close the store: queued calls fail, and running calls are waited for, for some seconds. Idempotent."""


class StoreBackend(ABC):
    """The interface that the author of a store implements, with blocking calls. Several threads call it concurrently.

    Calls raise `StoreError` and nothing else. Arguments and results are those of `BlockStore`.

    Attributes:
        num_readers: maximum number of concurrent calls of `get` and `exists`.
    """

    num_readers = 2

    @abstractmethod
    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> PutResult:
        """Store objects."""

    @abstractmethod
    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        """Return the object under each key, or None. The bytes of a loan must not be writable by other processes."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether there is an object under each key."""

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Mark objects as used, so that the store evicts them later, and return which of the keys have one.

        The last key becomes the most recently used one. Called only for stores that servers share. By default, this is
        `exists`, which suits stores that do not evict by recency, or that count `exists` as a use.
        """
        return self.exists(keys)

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete objects. Return the number of those that existed."""

    def purge(self, scope: KeyScope) -> int:
        """Delete all objects whose keys are in a scope. Called only for stores that servers share."""
        raise NotImplementedError

    @abstractmethod
    def size(self) -> StoreSize:
        """Return the contents and the capacity, without waiting for anything outside this process."""

    @abstractmethod
    def close(self) -> None:
        """Close the store, while no call is running. Idempotent."""
