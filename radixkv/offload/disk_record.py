"""The record of what is on the disk, from which the next process learns whose blocks they are."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from radixkv.api.retention import MAX_PRIORITY
from radixkv.errors import StoreError
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import KEY_BYTES, BlockKeys
from radixkv.offload.index.namespace_keys import NamespaceKeys
from radixkv.offload.index.retention import RetentionHint
from radixkv.offload.tiers.disk import DiskStore

_log = logging.getLogger(__name__)
_LINE = np.dtype([("key", f"V{KEY_BYTES}"), ("ends_s", "<f8"), ("priority", "u1"), ("more", "V7")])
_NEVER = float("inf")
_PRIORITIES = "priorities"
_FEW = 1024  # namespaces


class KeptPriority(NamedTuple):
    """Priority of a block.

    Attributes:
        key: of the block.
        priority: 0 to 255; what the file says, which may be anything.
        ends_s: when it ends, in seconds since 1970; None for never.
    """

    key: bytes
    priority: int
    ends_s: float | None


class PriorityFile:
    """A file with a line of 48 bytes for each block that has a priority.

    It is there only between a process that ends in order and the next one: what a process that is killed was told
    after its start would contradict it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, priorities: Iterable[KeptPriority]) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: the disk fails.
        """
        rows = [(key, _NEVER if ends_s is None else ends_s, priority, b"") for key, priority, ends_s in priorities]
        partial = self._path.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(np.array(rows, _LINE).tobytes())
        partial.replace(self._path)

    def take(self) -> list[KeptPriority]:
        """Read the file, and delete it. Returns nothing if there is none, or if it is not one of ours.

        Raises:
            OSError: the disk fails.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        self._path.unlink()
        if len(data) % _LINE.itemsize:
            _log.warning("%s: expected whole lines, got %d bytes", self._path, len(data))
            return []
        lines = np.frombuffer(data, _LINE)
        columns = (lines[name].tolist() for name in ("key", "priority", "ends_s"))
        rows = zip(*columns, strict=True)
        return [KeptPriority(key, priority, None if ends_s == _NEVER else ends_s) for key, priority, ends_s in rows]


class FoundOnDisk(NamedTuple):
    """Blocks and priorities that earlier processes left on a disk.

    Attributes:
        blocks: keys and whose they are, the one that goes first at first.
        hints: priorities of some of them, in the same order.
    """

    blocks: Sequence[tuple[bytes, Namespace]]
    hints: Sequence[tuple[bytes, RetentionHint]]


class DiskRecord:
    """Tells the next process whose blocks are on a disk, and reads what the last one told.

    Args:
        disk: the store.
        keys: of the format of its blocks.
        clock: seconds, that of the cache.
        time_of_day: seconds since 1970, which the next process has, too.
    """

    def __init__(
        self,
        disk: DiskStore,
        keys: BlockKeys,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._disk = disk
        self._priorities = PriorityFile(disk.path / _PRIORITIES)
        self._keys = keys
        self._clock = clock
        self._time_of_day = time_of_day

    def note(self, namespace: Namespace) -> None:
        """Note that blocks of a namespace are stored. The store writes it before them."""
        self._disk.namespaces.add(self._keys.root(namespace), namespace)

    def tidy(self, stored: NamespaceKeys) -> None:
        """Forget namespaces without blocks if most of those known have none: how many come is up to callers.

        Args:
            stored: what is on the disk, of earlier processes as well.

        Complexity: O(namespaces), once in as many.
        """
        if len(self._disk.namespaces) > 2 * stored.num_namespaces + _FEW:
            self._disk.namespaces.keep({self._keys.root(namespace) for namespace in stored})

    def persist_order(self, keys: Sequence[bytes]) -> None:
        """Note the order in which blocks go, the one that goes first at first; see `DiskStore.arrange`."""
        self._disk.persist_order(keys)

    def keep(self, hints: Sequence[tuple[bytes, RetentionHint]]) -> None:
        """Note the priorities of blocks, the one that goes first at first. A disk that fails has none then."""
        start_s = self._time_of_day() - self._clock()
        ends_s = [None if hint.expires_s is None else start_s + hint.expires_s for _, hint in hints]
        rows = zip(hints, ends_s, strict=True)
        try:
            self._priorities.write(KeptPriority(key, hint.priority, end_s) for (key, hint), end_s in rows)
        except OSError as error:
            _log.error("tier disk: expected to note %d priorities, got: %s", len(hints), error)

    def read(self) -> FoundOnDisk:
        """List the blocks of earlier processes, whose they are, and the priorities that have not ended.

        A key's tags name its namespace, so blocks are found also where those before them are gone: they are of use once
        these are computed again. Blocks of which that is not known are deleted: no purge could reach them. So are those
        of two namespaces with the same tags: any two salts of a tenant have them once in 16 million.

        Complexity: O(blocks), without reading them.
        """
        start_s = time.perf_counter()
        keys = list(self._disk)  # before the owners: what comes meanwhile is not to be judged
        owners = self._owners()
        found = [(key, owners.get(self._keys.tags_of(key))) for key in keys]
        useless = [key for key, owner in found if owner is None]
        try:
            self._disk.delete(useless)
        except StoreError as error:
            _log.error("tier disk: expected to delete %d blocks that nobody can purge, got: %s", len(useless), error)
        num_found = len(found) - len(useless)
        took_s = time.perf_counter() - start_s
        _log.info("found %d blocks on disk in %.2f s, and deleted %d", num_found, took_s, len(useless))
        return FoundOnDisk([(key, owner) for key, owner in found if owner is not None], self._hints())

    def _hints(self) -> list[tuple[bytes, RetentionHint]]:
        start_s = self._time_of_day() - self._clock()
        now_s = self._clock()
        try:
            kept = self._priorities.take()
        except OSError as error:
            _log.error("tier disk: expected to read the priorities that it notes, got: %s", error)
            return []
        hints = [
            (key, RetentionHint(priority, None if ends_s is None else ends_s - start_s))
            for key, priority, ends_s in kept
        ]
        return [
            (key, hint)
            for key, hint in hints
            if hint.priority <= MAX_PRIORITY and (hint.expires_s is None or hint.expires_s > now_s)
        ]

    def _owners(self) -> dict[bytes, Namespace | None]:
        """Return the namespace of each tag; None where it is not the only one."""
        owners: dict[bytes, Namespace | None] = {}
        for namespace in self._disk.namespaces.by_root().values():
            tags = self._keys.tags_of(self._keys.root(namespace))
            owners[tags] = namespace if owners.get(tags, namespace) == namespace else None
        return owners
