"""Records which blocks the tiers below the device have, for readers that request it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from radixkv.api.events import HASH_BYTES, BlocksRemoved, BlocksStored
from radixkv.events.block_identity import Identities, hash_blocks
from radixkv.namespace import Namespace
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.index.tier_index import StoreListener, TierIndex
from radixkv.tokens import TOKEN_BYTES


class TrackedBlock(NamedTuple):
    """The event blocks of one block of the pool.

    Attributes:
        hashes: hashes of the event blocks, packed.
        cache_salt: as in `BlocksStored`.
        stores: names of the stores that were reported to have the block.
    """

    hashes: bytes
    cache_salt: str
    stores: tuple[str, ...] = ()


class _Change(NamedTuple):
    """What changed, apart from the blocks: consecutive equal changes become one event."""

    is_stored: bool
    store: str
    cache_salt: str


class StoreFeed(StoreListener):
    """Turns changes of the stores into events with the hashes that the blocks had on the device.

        identified: key ─▶ hashes        stored, removed: key ─▶ event of these hashes, with the store's name

    Stores know only the keys of blocks, not their tokens. A block is therefore reported when a prompt that contains it
    is evicted from the device, or finds it in a store. Until then, blocks that another process has written to a disk or
    to a shared store are not reported. A block is tracked as long as a store has it.

    Args:
        tier_indexes: the stores, by name.
        block_size: tokens per event block. Nothing is reported unless it divides `pool_block_size`.
        pool_block_size: tokens per block of the pool.
        identities: names of namespaces.
    """

    def __init__(
        self, tier_indexes: Mapping[str, TierIndex], block_size: int, pool_block_size: int, identities: Identities
    ) -> None:
        self._tier_indexes = tier_indexes
        self._block_size = block_size
        self._pool_block_size = pool_block_size
        self._identities = identities
        self._tracked: dict[bytes, TrackedBlock] = {}
        self._changes: deque[tuple[_Change, bytes]] = deque()

    @property
    def has_pending_changes(self) -> bool:
        """Whether changes wait to be published."""
        return bool(self._changes)

    def switch_on(self) -> None:
        """Record changes from now on."""
        self.is_on = self._pool_block_size % self._block_size == 0

    def close(self) -> None:
        """Stop recording."""
        self.is_on = False
        self._changes.clear()
        self._tracked.clear()

    def identified(self, namespace: Namespace, tokens: bytes, start: int, blocks: Sequence[KeyedBlock]) -> None:
        """Record the hashes of blocks, and report those that are stored, except blocks of invoked adapters."""
        new_blocks = [
            (index, block)
            for index, block in enumerate(blocks, start)
            if block.namespace == namespace and self._is_new(block.key)
        ]
        if not new_blocks:
            return
        identity = self._identities.of(namespace)
        end_bytes = (start + len(blocks)) * self._pool_block_size * TOKEN_BYTES
        hashes = hash_blocks(identity.root, tokens[:end_bytes], self._block_size * TOKEN_BYTES)
        hash_bytes = self._pool_block_size // self._block_size * HASH_BYTES  # per block of the pool
        for index, block in new_blocks:
            block_hashes = hashes[index * hash_bytes : (index + 1) * hash_bytes]
            self._tracked[block.key] = TrackedBlock(block_hashes, identity.cache_salt)
            for name, tier_index in self._tier_indexes.items():
                if tier_index.holds(block.key):
                    self.stored(name, block.key)

    def stored(self, store: str, key: bytes) -> None:
        """Record that a store has a block."""
        tracked = self._tracked.get(key)
        if tracked is not None and store not in tracked.stores:
            self._tracked[key] = tracked._replace(stores=(*tracked.stores, store))
            self._changes.append((_Change(True, store, tracked.cache_salt), tracked.hashes))

    def removed(self, store: str, key: bytes) -> None:
        """Record that a store lost a block, and drop its hashes if no other store has it."""
        tracked = self._tracked.get(key)
        if tracked is None:
            return
        if store in tracked.stores:
            stores = tuple(name for name in tracked.stores if name != store)
            self._tracked[key] = tracked._replace(stores=stores)
            self._changes.append((_Change(False, store, tracked.cache_salt), tracked.hashes))
        if not any(key in tier_index for tier_index in self._tier_indexes.values()):
            del self._tracked[key]

    def take(self, max_blocks: int) -> list[BlocksStored | BlocksRemoved]:
        """Return events for the oldest pending changes, in order, up to about `max_blocks` event blocks."""
        max_changes = 1 + max_blocks * self._block_size // self._pool_block_size
        changes = [self._changes.popleft() for _ in range(min(max_changes, len(self._changes)))]
        events: list[BlocksStored | BlocksRemoved] = []
        for change, group in groupby(changes, itemgetter(0)):
            hashes = b"".join(block_hashes for _, block_hashes in group)
            if change.is_stored:
                events.append(BlocksStored(None, hashes, b"", self._block_size, change.cache_salt, change.store))
            else:
                events.append(BlocksRemoved(hashes, change.cache_salt, change.store))
        return events

    def tracked_blocks(self) -> list[TrackedBlock]:
        """List the tracked blocks. Complexity: O(blocks)."""
        return list(self._tracked.values())

    def _is_new(self, key: bytes) -> bool:
        return key not in self._tracked and any(key in tier_index for tier_index in self._tier_indexes.values())
