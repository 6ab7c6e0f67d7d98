"""The parts of one cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.changes import Changes
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.held_blocks import HeldBlocks
from radixkv.cache.lines.eviction_lines import EvictionLines
from radixkv.cache.lines.probation import Probation
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.retained_nodes import RetainedNodes
from radixkv.cache.tenants import Tenants
from radixkv.cache.windowed_layers import WindowedLayers


@dataclass(frozen=True, slots=True)
class CacheState:
    """The parts of one cache, handed as one value to the actors that work on them.

    Attributes:
        block_size: tokens a block.
        trees: the tree of each namespace that has a cached token.
        pool: the state of each block.
        parts: the parts of blocks for layers that need less of a prompt.
        tenants: the bounds and the counters of each tenant.
        policy: orders the eviction lines.
        lines: the leaves that may be evicted.
        probation: knows which of them were never reused.
        retained: the nodes that have a priority.
        kept: counts what held leases keep.
        changes: tells listeners what happens to nodes.
        clock: seconds, never going back.
    """

    block_size: int
    trees: NamespaceTrees
    pool: BlockPool
    parts: WindowedLayers
    tenants: Tenants
    policy: EvictionPolicy
    lines: EvictionLines
    probation: Probation
    retained: RetainedNodes
    kept: HeldBlocks
    changes: Changes
    clock: Callable[[], float]
