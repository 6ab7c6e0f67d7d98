"""The seam: what a store of blocks does, as callers see it and as its author writes it.

Tier ──▶ GuardedStore ──▶ ThreadedStore ──▶ StoreBackend: host memory, disk, Redis, Mooncake, a plug-in
         BlockStore        BlockStore        synchronous, called on threads of its own
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
    """Fate of one object that a store was given."""

    STORED = "stored"
    ALREADY_THERE = "already_there"  # under this key, of this or a later generation
    NO_ROOM = "no_room"
    TOO_LARGE = "too_large"  # and always will be
    NOT_ASKED = "not_asked"  # the call never reached the store


@dataclass(frozen=True, slots=True)
class PutResult:
    """Fates of the objects of one batch.

    Attributes:
        outcomes: one for each object.
        evicted: keys that left the store to make room.
    """

    outcomes: tuple[PutOutcome, ...]
    evicted: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Room in a store, and what it holds.

    Attributes:
        num_objects: objects that it holds; None if only a server knows.
        used_bytes: bytes that they take.
        capacity_bytes: bytes that they may take; None where another program sets the bound.
        max_objects: objects that it has room for; None where that depends on their sizes.
    """

    num_objects: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    max_objects: int | None = None


class Loan:
    """Bytes of one object, lent by a store. They stay as they are until the loan ends.

    It ends with `release`, at the end of a `with`, or when the last reference to it goes, so that an answer nobody
    waits for anymore keeps nothing.

    Attributes:
        data: the object as it was stored; read-only. Not to be touched after the end.
        checksum: `checksum_of` these bytes, if the store took it when they came; None if it did not.
    """

    __slots__ = ("_on_release", "checksum", "data")

    def __init__(
        self, data: memoryview, on_release: Callable[[], None] | None = None, checksum: bytes | None = None
    ) -> None:
        self.data = data.toreadonly()
        self.checksum = checksum
        self._on_release = on_release

    def release(self) -> None:
        """End the loan; once more has no effect."""
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
    """A store as callers see it: each call returns at once, and its future ends on a thread of the store.

    A future that is cancelled before its call started is never started. Futures end with `StoreError`: busy, not
    reachable, closed. Objects are what `BlockObject` makes; a store neither reads nor checks them.
    """

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> Future[PutResult]:
        """Store objects.

        Args:
            objects: theirs are the payloads from now on: they must never change again.
            victims: keys to evict, in this order, if room is needed, but none that is being read: then there is no
                room. After them goes what was not used for longest.
        """

    def get(self, keys: Sequence[bytes]) -> Future[list[Loan | None]]:
        """Return the object under each key, or None."""

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Return whether there is an object under each key."""

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Forget objects. Return the number of those that were there."""

    def purge(self, scope: KeyScope) -> Future[int]:
        """Forget the objects of a shared store that have such keys, whoever stored them. Return their number."""

    def size(self) -> StoreSize:
        """Return what the store holds, without waiting."""

    def close(self) -> None:
        """End the store: calls that did not start fail, those under way are waited for. Once more has no effect."""


class StoreBackend(ABC):
    """A store as its author writes it: calls that may take long. Several threads call it at a time.

    Calls raise `StoreError` and nothing else. Arguments and results are those of `BlockStore`.

    Attributes:
        num_readers: calls of `get` and `exists` that run at a time.
    """

    num_readers = 2

    @abstractmethod
    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> PutResult:
        """Store objects."""

    @abstractmethod
    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        """Return the object under each key, or None."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether there is an object under each key."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget objects. Return the number of those that were there."""

    def purge(self, scope: KeyScope) -> int:
        """Forget the objects that have such keys, whoever stored them. Only stores that servers share are asked."""
        raise NotImplementedError

    @abstractmethod
    def size(self) -> StoreSize:
        """Return what the store holds, without waiting for anything outside this process."""

    @abstractmethod
    def close(self) -> None:
        """End the store; no call is under way. Once more has no effect."""
