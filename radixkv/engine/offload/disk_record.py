"""The record of what is on a disk, for the process after this one."""

from __future__ import annotations

import logging
import time

from radixkv.namespace import Namespace
from radixkv.storage.tiers.block_key import BlockKeys
from radixkv.storage.tiers.block_object import ObjectHead
from radixkv.storage.tiers.disk import DiskStore

_log = logging.getLogger(__name__)


class DiskRecord:
    """Tells the next process whose blocks are on a disk, and reads what the last one told.

    Blocks of invoked adapters are not found again: their keys do not follow from their tokens alone.

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

    def read(self) -> list[tuple[bytes, Namespace]]:
        """List the blocks of earlier processes and whose they are, the one that goes first at first.

        Blocks of which that is not known are deleted: no purge could reach them.

        Raises:
            StoreError: the disk can't be read.

        Complexity: a read of a page a block.
        """
        start_s = time.perf_counter()
        parents: dict[bytes, bytes] = {}
        found: list[bytes] = []
        for head, tokens in self._disk.heads():
            found.append(head.key)
            if self._follows(head, tokens):
                parents[head.key] = head.parent
        owners = self._owners(parents)
        useless = [key for key in found if key not in owners]
        if useless:
            self._disk.delete(useless)
        took_s = time.perf_counter() - start_s
        _log.info("found %d blocks on disk in %.2f s, and deleted %d", len(owners), took_s, len(useless))
        return [(key, owners[key]) for key in parents if key in owners]

    def _follows(self, head: ObjectHead, tokens: bytes) -> bool:
        """Whether a block follows its parent, both of one namespace. Of a sealed one the tags tell no more than that.

        A sealed head that was changed opens nothing.
        """
        if head.is_sealed:
            return self._keys.have_one_namespace(head.key, head.parent)
        return self._keys.child(head.parent, tokens) == head.key

    def _owners(self, parents: dict[bytes, bytes]) -> dict[bytes, Namespace]:
        """Follow each block to the beginning of its prompt. Complexity: O(blocks)."""
        owners: dict[bytes, Namespace] = {}
        roots = self._disk.names.namespaces
        for each in parents:
            path, key = [], each
            while key in parents and key not in owners:
                path.append(key)
                key = parents[key]
            owner = owners.get(key) or roots.get(key)
            if owner is not None:
                owners.update(dict.fromkeys(path, owner))
        return owners
