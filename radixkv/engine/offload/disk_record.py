"""The record of what is on a disk, for the process after this one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from radixkv.api.retention import MAX_PRIORITY
from radixkv.cache.elsewhere.owned_keys import OwnedKeys
from radixkv.cache.elsewhere.retentions import Wish
from radixkv.engine.offload.priority_file import KeptPriority, PriorityFile
from radixkv.errors import StoreError
from radixkv.namespace import Namespace
from radixkv.storage.tiers.block_key import BlockKeys
from radixkv.storage.tiers.disk import DiskStore

_log = logging.getLogger(__name__)
_PRIORITIES = "priorities"
_FEW = 1024  # namespaces


class EarlierDisk(NamedTuple):
    """Blocks and priorities that earlier processes left on a disk.

    Attributes:
        blocks: keys and whose they are, the one that goes first at first.
        wishes: priorities of some of them, in the same order.
    """

    blocks: Sequence[tuple[bytes, Namespace]]
    wishes: Sequence[tuple[bytes, Wish]]


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
        self._disk.names.add(self._keys.root(namespace), namespace)

    def tidy(self, stored: OwnedKeys) -> None:
        """Forget namespaces without blocks if most of those known have none: how many come is up to callers.

        Args:
            stored: what is on the disk, of earlier processes as well.

        Complexity: O(namespaces), once in as many.
        """
        if len(self._disk.names) > 2 * stored.num_namespaces + _FEW:
            self._disk.names.keep({self._keys.root(namespace) for namespace in stored})

    def arrange(self, keys: Sequence[bytes]) -> None:
        """Note the order in which blocks go, the one that goes first at first; see `DiskStore.arrange`."""
        self._disk.arrange(keys)

    def keep(self, wishes: Sequence[tuple[bytes, Wish]]) -> None:
        """Note the priorities of blocks, the one that goes first at first. A disk that fails has none then."""
        start_s = self._time_of_day() - self._clock()
        ends_s = [None if wish.expires_s is None else start_s + wish.expires_s for _, wish in wishes]
        rows = zip(wishes, ends_s, strict=True)
        try:
            self._priorities.write(KeptPriority(key, wish.priority, end_s) for (key, wish), end_s in rows)
        except OSError as error:
            _log.error("tier disk: expected to note %d priorities, got: %s", len(wishes), error)

    def read(self) -> EarlierDisk:
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
        num_found, took_s = len(found) - len(useless), time.perf_counter() - start_s
        _log.info("found %d blocks on disk in %.2f s, and deleted %d", num_found, took_s, len(useless))
        return EarlierDisk([(key, owner) for key, owner in found if owner is not None], self._wishes())

    def _wishes(self) -> list[tuple[bytes, Wish]]:
        start_s, now_s = self._time_of_day() - self._clock(), self._clock()
        try:
            kept = self._priorities.take()
        except OSError as error:
            _log.error("tier disk: expected to read the priorities that it notes, got: %s", error)
            return []
        wishes = [(key, Wish(priority, None if ends_s is None else ends_s - start_s)) for key, priority, ends_s in kept]
        return [
            (key, wish)
            for key, wish in wishes
            if wish.priority <= MAX_PRIORITY and (wish.expires_s is None or wish.expires_s > now_s)
        ]

    def _owners(self) -> dict[bytes, Namespace | None]:
        """Return the namespace of each tag; None where it is not the only one."""
        owners: dict[bytes, Namespace | None] = {}
        for namespace in self._disk.names.known().values():
            tags = self._keys.tags_of(self._keys.root(namespace))
            owners[tags] = namespace if owners.get(tags, namespace) == namespace else None
        return owners
