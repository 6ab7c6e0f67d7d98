"""The record of what is on a disk, for the process after this one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from radixkv.namespace import Namespace
from radixkv.storage.tiers.block_key import BlockKeys
from radixkv.storage.tiers.disk import DiskStore

_log = logging.getLogger(__name__)


class DiskRecord:
    """Tells the next process whose blocks are on a disk, and reads what the last one told.

    Args:
        disk: the store.
        keys: of the format of its blocks.
    """

    def __init__(self, disk: DiskStore, keys: BlockKeys) -> None:
        self._disk = disk
        self._keys = keys
        self._noted: set[Namespace] = set()

    def note(self, namespace: Namespace) -> None:
        """Note that blocks of a namespace are stored. Complexity: a write of one line the first time."""
        if namespace not in self._noted:
            self._noted.add(namespace)
            self._disk.names.add(self._keys.root(namespace), namespace)

    def arrange(self, keys: Sequence[bytes]) -> None:
        """Note the order in which blocks go, the one that goes first at first; see `DiskStore.arrange`."""
        self._disk.arrange(keys)

    def read(self) -> list[tuple[bytes, Namespace]]:
        """List the blocks of earlier processes and whose they are, the one that goes first at first.

        A key's tags name its namespace, so blocks are found also where those before them are gone: they are of use once
        these are computed again. Blocks of which that is not known are deleted: no purge could reach them. So are those
        of two namespaces with the same tags, two salts in 16 million.

        Raises:
            StoreError: the disk fails.

        Complexity: O(blocks), without reading them.
        """
        start_s = time.perf_counter()
        owners = self._owners()
        found = [(key, owners.get(self._keys.tags_of(key))) for key in self._disk]
        useless = [key for key, owner in found if owner is None]
        if useless:
            self._disk.delete(useless)
        num_found, took_s = len(found) - len(useless), time.perf_counter() - start_s
        _log.info("found %d blocks on disk in %.2f s, and deleted %d", num_found, took_s, len(useless))
        return [(key, owner) for key, owner in found if owner is not None]

    def _owners(self) -> dict[bytes, Namespace | None]:
        """Return the namespace of each tag; None where it is not the only one."""
        owners: dict[bytes, Namespace | None] = {}
        for namespace in self._disk.names.namespaces.values():
            tags = self._keys.tags_of(self._keys.root(namespace))
            owners[tags] = namespace if owners.get(tags, namespace) == namespace else None
        return owners
