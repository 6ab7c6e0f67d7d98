"""The loaded adapters: all of them in host memory, the most recently used ones on the device."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from radixkv.errors import InvalidAdapter, TooManyAdapters, UnknownAdapter
from radixkv.model.adapters.adapter_files import AdapterFiles


class AdapterRange(NamedTuple):
    """Rows `[start, end)` of a step, and the digest of their adapter."""

    digest: str
    start: int
    end: int


T = TypeVar("T")  # an adapter that is packed for the device

_log = logging.getLogger(__name__)


class AdapterSet(Generic[T]):
    """Keeps adapters by digest, and copies them to the device when a step needs them. Only the engine's thread uses it.

    The least recently used adapters are evicted from the device when others need the memory. All adapters of a step
    are on the device, even if they exceed `max_bytes` together: all other adapters are then evicted, and those of the
    step when a later step needs other adapters.

    Args:
        pack: packs an adapter in device memory. Dropping the result frees the memory.
        max_adapters: maximum number of loaded adapters.
        max_bytes: maximum bytes of adapters on the device.
        size: returns the bytes that an adapter takes on the device.
    """

    def __init__(
        self,
        pack: Callable[[AdapterFiles], T],
        max_adapters: int,
        max_bytes: int,
        size: Callable[[AdapterFiles], int] = lambda files: files.num_bytes,
    ) -> None:
        self._pack = pack
        self._size_of = size
        self.max_adapters = max_adapters
        self.max_bytes = max_bytes
        self._files: dict[str, AdapterFiles] = {}
        self._sizes: dict[str, int] = {}  # bytes on the device, by digest
        self._on_device: OrderedDict[str, T] = OrderedDict()  # in LRU order, the most recently used one last

    def __len__(self) -> int:
        """Return the number of loaded adapters."""
        return len(self._files)

    @property
    def device_bytes(self) -> int:
        """Bytes of the adapters on the device."""
        return sum(self._sizes[digest] for digest in self._on_device)

    def holds(self, digest: str) -> bool:
        """Whether an adapter is loaded, on the device or on the host. O(1)."""
        return digest in self._files

    def is_on_device(self, digest: str) -> bool:
        """Whether an adapter is on the device. O(1)."""
        return digest in self._on_device

    def add(self, files: AdapterFiles) -> None:
        """Add an adapter in host memory; a step that needs it copies it to the device. No-op if its digest is loaded.

        Raises:
            TooManyAdapters: `max_adapters` are loaded.
            InvalidAdapter: it alone takes more than `max_bytes` on the device.
        """
        if files.digest in self._files:
            return
        if len(self._files) >= self.max_adapters:
            raise TooManyAdapters(f"model.max_adapters: expected at most {self.max_adapters} adapters, got one more")
        num_bytes = self._size_of(files)
        if num_bytes > self.max_bytes:
            raise InvalidAdapter(
                f"model.adapter_bytes: expected an adapter of at most {self.max_bytes} bytes, got {num_bytes}"
            )
        self._files[files.digest], self._sizes[files.digest] = files, num_bytes

    def remove(self, digest: str) -> None:
        """Remove an adapter, which no step may need any more. No-op if it is not loaded."""
        self._files.pop(digest, None)
        self._sizes.pop(digest, None)
        self._on_device.pop(digest, None)

    def put_on_device(self, digests: Iterable[str]) -> dict[str, T]:
        """Copy the adapters of a step to the device if they are not there, and return them by digest. May evict others.

        Raises:
            UnknownAdapter: one of them is not loaded.
        """
        needed = dict.fromkeys(digests)
        missing = [digest for digest in needed if digest not in self._files]
        if missing:
            raise UnknownAdapter(f"adapter: expected one that is loaded, got digest {missing[0]}")
        for digest in needed:
            if digest in self._on_device:
                self._on_device.move_to_end(digest)
        self._evict_others(set(needed))
        for digest in needed:
            if digest not in self._on_device:
                self._on_device[digest] = self._pack(self._files[digest])
        return {digest: self._on_device[digest] for digest in needed}

    def _evict_others(self, needed: set[str]) -> None:
        """Evict the least recently used adapters that the step does not need, until the needed ones fit."""
        num_bytes = self.device_bytes + sum(self._sizes[digest] for digest in needed - self._on_device.keys())
        for digest in [each for each in self._on_device if each not in needed]:
            if num_bytes <= self.max_bytes:
                break
            del self._on_device[digest]
            num_bytes -= self._sizes[digest]
            _log.debug("adapter %s evicted from the device", digest)
