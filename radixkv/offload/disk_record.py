"""Records the namespaces, the eviction order and the priorities of the blocks on disk for the next process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from radixkv.api.retention import MAX_PRIORITY
from radixkv.durable_file import replace_file
from radixkv.errors import StoreError
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import KEY_BYTES, BlockKeys
from radixkv.offload.index.namespace_keys import NamespaceKeys
from radixkv.offload.index.retention import RetentionHint
from radixkv.offload.tiers.block_object import ObjectFault
from radixkv.offload.tiers.disk import DiskStore
from radixkv.offload.tiers.rejected_blocks import RejectedBlocks

_log = logging.getLogger(__name__)
# A line of the file of priorities. `ends_s` is a Unix time.
_PRIORITY_LINE = np.dtype([("key", f"V{KEY_BYTES}"), ("ends_s", "<f8"), ("priority", "u1"), ("unused", "V7")])
_NEVER = float("inf")
_MIN_UNUSED_NAMESPACES = 1024


class FoundOnDisk(NamedTuple):
    """Blocks and priorities that earlier processes left on the disk.

    Attributes:
        blocks: keys and their namespaces, in eviction order.
        hints: priorities by key, in the same order; also of blocks that are no longer on the disk.
    """

    blocks: Sequence[tuple[bytes, Namespace]]
    hints: Sequence[tuple[bytes, RetentionHint]]


class DiskRecord:
    """Records the namespaces, the eviction order and the priorities of the blocks on the disk, and reads them back.

    The priorities are in a file with a line of 48 bytes for each block that has one. The file exists only between a
    clean shutdown and the next start: a process reads and deletes it at its start, since priorities that are set later
    would make it outdated if the process is killed.

    Args:
        disk: the store.
        keys: computes keys for the format of its blocks.
        clock: seconds, monotonic, as in the cache.
        unix_time: Unix time in seconds, which is comparable between processes.
        rejected: counts blocks of unknown namespaces; None not to count them.
    """

    def __init__(
        self,
        disk: DiskStore,
        keys: BlockKeys,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        rejected: RejectedBlocks | None = None,
    ) -> None:
        self._rejected = rejected
        self._disk = disk
        self._priority_path = disk.path / "priorities"
        self._keys = keys
        self._clock = clock
        self._unix_time = unix_time

    def note(self, namespace: Namespace) -> None:
        """Record a namespace whose blocks will be stored. The store writes it before the blocks."""
        self._disk.namespaces.add(self._keys.root(namespace), namespace)

    def tidy(self, stored: NamespaceKeys) -> None:
        """Forget the namespaces without blocks if their number exceeds that of the others by more than 1024.

        Without this, the record could grow without limit, since clients can create any number of namespaces.

        Args:
            stored: the namespaces of all blocks on the disk, including those of earlier processes.

        Complexity: amortized O(1) per recorded namespace.
        """
        if len(self._disk.namespaces) > 2 * stored.num_namespaces + _MIN_UNUSED_NAMESPACES:
            self._disk.namespaces.keep({self._keys.root(namespace) for namespace in stored})

    def persist_order(self, keys: Sequence[bytes]) -> None:
        """Record the eviction order of the blocks; see `DiskStore.persist_order`."""
        self._disk.persist_order(keys)

    def persist_priorities(self, hints: Sequence[tuple[bytes, RetentionHint]]) -> None:
        """Write the priorities of blocks, in eviction order. If the write fails, logs an error, and they are lost."""
        clock_start_s = self._unix_time() - self._clock()
        rows = [
            (key, _NEVER if hint.expires_s is None else clock_start_s + hint.expires_s, hint.priority, b"")
            for key, hint in hints
        ]
        try:
            replace_file(self._priority_path, np.array(rows, _PRIORITY_LINE).tobytes())
        except OSError as error:
            _log.error("tier disk: writing %d priorities failed: %s", len(hints), error)

    def read(self) -> FoundOnDisk:
        """List the blocks of earlier processes with their namespaces, and the priorities that have not expired.

        The tags of a key identify its namespace, so a block is found even if the blocks before it are gone. It can be
        loaded once these have been computed again. Blocks of unknown namespaces are deleted, since no purge finds them.
        Blocks with the tags of another secret are deleted for the same reason, and so are blocks whose tags belong to
        two namespaces. Two salts of a tenant have the same tags with a probability of 1 in 16 million.

        Complexity: O(blocks), without reading them.
        """
        start_s = time.perf_counter()
        # The keys are listed before the owners, so that blocks stored in the meantime are not deleted.
        keys = list(self._disk)
        owners = self._owners()
        keys_with_owners = [(key, owners.get(self._keys.tags_of(key))) for key in keys]
        useless = [key for key, owner in keys_with_owners if owner is None]
        try:
            self._disk.delete(useless)
        except StoreError as error:
            _log.error("tier disk: deleting %d blocks of unknown namespaces failed: %s", len(useless), error)
        if self._rejected is not None:
            self._rejected.add([ObjectFault.FOREIGN] * len(useless))
        num_found = len(keys) - len(useless)
        took_s = time.perf_counter() - start_s
        _log.info("found %d blocks on disk in %.2f s, and deleted %d", num_found, took_s, len(useless))
        blocks = [(key, owner) for key, owner in keys_with_owners if owner is not None]
        return FoundOnDisk(blocks, self._take_hints())

    def _take_hints(self) -> list[tuple[bytes, RetentionHint]]:
        """Read the priorities that have not expired, and delete their file. A truncated file counts as none."""
        try:
            data = self._priority_path.read_bytes()
            self._priority_path.unlink()
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.error("tier disk: reading the priorities failed: %s", error)
            return []
        if len(data) % _PRIORITY_LINE.itemsize:
            _log.warning("%s: expected whole lines, got %d bytes", self._priority_path, len(data))
            return []
        lines = np.frombuffer(data, _PRIORITY_LINE)
        clock_start_s = self._unix_time() - self._clock()
        now_s = self._clock()
        columns = (lines[name].tolist() for name in ("key", "priority", "ends_s"))
        hints = [
            (key, RetentionHint(priority, None if ends_s == _NEVER else ends_s - clock_start_s))
            for key, priority, ends_s in zip(*columns, strict=True)
        ]
        return [
            (key, hint)
            for key, hint in hints
            if hint.priority <= MAX_PRIORITY and (hint.expires_s is None or hint.expires_s > now_s)
        ]

    def _owners(self) -> dict[bytes, Namespace | None]:
        """Return the namespace of each combination of tags; None if several namespaces share it."""
        owners: dict[bytes, Namespace | None] = {}
        for namespace in self._disk.namespaces.by_root().values():
            tags = self._keys.tags_of(self._keys.root(namespace))
            owners[tags] = namespace if owners.get(tags, namespace) == namespace else None
        return owners
