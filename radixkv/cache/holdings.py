"""The parts of one cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.changes import Changes
from radixkv.cache.kept_blocks import KeptBlocks
from radixkv.cache.lines.eviction_lines import EvictionLines
from radixkv.cache.lines.probation import Probation
from radixkv.cache.namespaces.forest import Forest
from radixkv.cache.parts.part_groups import PartGroups
from radixkv.cache.policies.policy import EvictionPolicy
from radixkv.cache.retained_nodes import RetainedNodes
from radixkv.cache.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Holdings:
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
    trees: Forest
    pool: BlockPool
    parts: PartGroups
    tenants: Tenants
    policy: EvictionPolicy
    lines: EvictionLines
    probation: Probation
    retained: RetainedNodes
    kept: KeptBlocks
    changes: Changes
    clock: Callable[[], float]
