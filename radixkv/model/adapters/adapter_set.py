"""The adapters that are loaded: all of them on the host, those used last on the device."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from radixkv.errors import InvalidAdapter, TooManyAdapters, UnknownAdapter
from radixkv.model.adapters.adapter_files import AdapterFiles


class AdapterRange(NamedTuple):
    """Rows `[start, end)` of a step, and the digest of the adapter that they are computed with."""

    digest: str
    start: int
    end: int


T = TypeVar("T")

_log = logging.getLogger(__name__)


class AdapterSet(Generic[T]):
    """Holds adapters by digest, and brings them to the device when a step needs them. For the engine's thread alone.

    Those that were used least recently leave the device when others need the bytes. A step has all its adapters, also
    where they take more bytes than allowed together: then the others have left, and these leave after the next step.

    Args:
        place: brings an adapter to the device, laid out for products. The result is freed to leave it again.
        max_adapters: adapters that may be held.
        max_bytes: bytes that they may take on the device.
        size: says how many bytes an adapter takes there.
    """

    def __init__(
        self,
        place: Callable[[AdapterFiles], T],
        max_adapters: int,
        max_bytes: int,
        size: Callable[[AdapterFiles], int] = lambda files: files.num_bytes,
    ) -> None:
        self._place = place
        self._size = size
        self.max_adapters = max_adapters
        self.max_bytes = max_bytes
        self._files: dict[str, AdapterFiles] = {}
        self._sizes: dict[str, int] = {}
        self._placed: OrderedDict[str, T] = OrderedDict()  # the one used last comes last

    def __len__(self) -> int:
        """Return the number of adapters that are held."""
        return len(self._files)

    @property
    def device_bytes(self) -> int:
        """Bytes of the adapters on the device."""
        return sum(self._sizes[digest] for digest in self._placed)

    def holds(self, digest: str) -> bool:
        """Whether an adapter is held, on the device or on the host. O(1)."""
        return digest in self._files

    def is_on_device(self, digest: str) -> bool:
        """Whether an adapter is on the device. O(1)."""
        return digest in self._placed

    def add(self, files: AdapterFiles) -> None:
        """Hold an adapter from now on. Does nothing if one of its digest is held. It stays on the host until needed.

        Raises:
            TooManyAdapters: as many are held as may be.
            InvalidAdapter: it takes more bytes than all may take on the device.
        """
        if files.digest in self._files:
            return
        if len(self._files) >= self.max_adapters:
            raise TooManyAdapters(f"model.max_adapters: expected at most {self.max_adapters} adapters, got one more")
        num_bytes = self._size(files)
        if num_bytes > self.max_bytes:
            raise InvalidAdapter(
                f"model.adapter_bytes: expected an adapter of at most {self.max_bytes} bytes, got {num_bytes}"
            )
        self._files[files.digest], self._sizes[files.digest] = files, num_bytes

    def remove(self, digest: str) -> None:
        """Forget an adapter; does nothing if it is not held. No step may need it any more."""
        self._files.pop(digest, None)
        self._sizes.pop(digest, None)
        self._placed.pop(digest, None)

    def need(self, digests: Iterable[str]) -> dict[str, T]:
        """Return the adapters of a step, by digest, on the device.

        Raises:
            UnknownAdapter: one of them is not held.
        """
        needed = dict.fromkeys(digests)
        missing = [digest for digest in needed if digest not in self._files]
        if missing:
            raise UnknownAdapter(f"adapter: expected one that is loaded, got digest {missing[0]}")
        for digest in needed:
            if digest in self._placed:
                self._placed.move_to_end(digest)
        self._make_room(needed.keys())
        for digest in needed:
            if digest not in self._placed:
                self._placed[digest] = self._place(self._files[digest])
        return {digest: self._placed[digest] for digest in needed}

    def _make_room(self, needed: Iterable[str]) -> None:
        """Let the least recently used adapters leave the device that a step does not need, until the others fit."""
        wanted = set(needed)
        num_bytes = self.device_bytes + sum(self._sizes[digest] for digest in wanted - self._placed.keys())
        for digest in [each for each in self._placed if each not in wanted]:
            if num_bytes <= self.max_bytes:
                break
            del self._placed[digest]
            num_bytes -= self._sizes[digest]
            _log.debug("adapter %s leaves the device", digest)
