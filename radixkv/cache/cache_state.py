"""The state of one cache: the objects that its leases and its audit work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.changes import Changes
from radixkv.cache.eviction_queue import EvictionQueue
from radixkv.cache.evictor import Evictor
from radixkv.cache.held_blocks import HeldBlocks
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.pins import Pins
from radixkv.cache.recurrent_states import StateSlots
from radixkv.cache.retained_nodes import RetainedNodes
from radixkv.cache.sessions import Sessions
from radixkv.cache.tenants import Tenants
from radixkv.cache.windowed_layers import WindowedLayers


@dataclass(frozen=True, slots=True)
class CacheState:
    """The objects that make up one cache.

    Attributes:
        block_size: tokens per block.
        trees: the tree of each namespace that has a cached token.
        pool: the state of each block.
        windows: the pools of windowed layers.
        state_slots: the slots of recurrent states and of their snapshots; None for a model without them.
        tenants: the bounds and the counters of each tenant.
        queue: the leaves that may be evicted.
        retained: the priorities of nodes.
        held: counts the blocks of held leases.
        sessions: the sessions, and the nodes that only one of them has used.
        changes: notifies listeners of changes to the trees.
        pins: keeps nodes that leases use from eviction.
        evictor: evicts leaves.
        clock: seconds, monotonic.
    """

    block_size: int
    trees: NamespaceTrees
    pool: BlockPool
    windows: WindowedLayers
    state_slots: StateSlots | None
    tenants: Tenants
    queue: EvictionQueue
    retained: RetainedNodes
    held: HeldBlocks
    sessions: Sessions
    changes: Changes
    pins: Pins
    evictor: Evictor
    clock: Callable[[], float]

    def num_room_blocks(self, num_expected_tokens: int, num_blocks: int) -> int:
        """Estimate how many blocks a lease of `num_blocks` will allocate later, including a copy of its last block."""
        num_expected_blocks = -(-num_expected_tokens // self.block_size)
        return num_expected_blocks + 1 - num_blocks if num_expected_blocks > num_blocks else 0
