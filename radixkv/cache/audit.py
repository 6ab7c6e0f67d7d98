"""Recounts a whole cache from its open leases and its trees."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

import numpy as np

from radixkv.blocks import BLOCK_ID_BYTES
from radixkv.cache.holdings import Holdings
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node, path_to
from radixkv.cache.pins import Pins
from radixkv.cache.retained_nodes import is_retained
from radixkv.errors import require_invariant

_require = functools.partial(require_invariant, "prefix cache")


def audit(holdings: Holdings, leases: Iterable[Lease], pins: Pins) -> None:
    """Compare every count and every index with what it stands for. Complexity: O(everything).

    Raises:
        InvariantViolation: the message names what does not add up.
    """
    pool, tenants, lines, retained = holdings.pool, holdings.tenants, holdings.lines, holdings.retained
    leases_of: Counter[Node] = Counter()
    leased, published = [], []  # packed block ids
    held: dict[str, Counter[str]] = {tenant: Counter() for tenant, _ in tenants.items()}
    for lease in leases:
        leased.append(lease.block_ids[lease.num_published_blocks :].tobytes())
        held[lease.namespace.tenant]["leased"] += lease.block_ids.size - lease.num_published_blocks
        leases_of.update(path_to(lease.node))
    num_evictable = num_expiring = 0
    for tree in holdings.trees.values():
        tree.check()
        _require(not tree.root.is_leaf, "an empty tree is kept")
        blocks = held[tree.owner.namespace.tenant]
        for node in tree.nodes():
            published.append(node.block_ids)
            leased.append(node.retired_block_ids)
            _require(node.pin_count > 0 or not node.retired_block_ids, "an unused node keeps a retired block")
            _require(node.pin_count == leases_of.pop(node, 0), "a pin count is not its number of leases")
            _require((node in lines) == node.is_evictable, "the eviction index is not the unused leaves")
            _require(_num_retained_children(node) == node.num_retained_children, "retained children are miscounted")
            blocks["retained"] += node.num_blocks if is_retained(node) else 0
            blocks["cached"] += node.num_blocks
            blocks["pinned"] += node.num_blocks if node.pin_count else 0
            blocks["leased"] += len(node.retired_block_ids) // BLOCK_ID_BYTES
            num_evictable += node.is_evictable
            num_expiring += node.expiry_entry is not None
    for node, num_leases in leases_of.items():
        _require(node.pin_count == num_leases and not node.block_ids, "a lease pins a node outside every tree")
        leased.append(node.retired_block_ids)
        held[node.owner.namespace.tenant]["leased"] += len(node.retired_block_ids) // BLOCK_ID_BYTES
    totals = sum(held.values(), Counter())
    _require(pins.num_pinned_blocks == totals["pinned"], "the number of pinned blocks drifted")
    _require(retained.num_blocks == totals["retained"], "the number of retained blocks drifted")
    _require(retained.num_blocks <= retained.max_blocks, "more blocks are retained than may be")
    _require(retained.num_expiring == num_expiring, "the expiry index holds a node outside every tree")
    _require(len(lines) == num_evictable, "the eviction index holds a node outside every tree")
    for tenant, usage in tenants.items():
        blocks = held[tenant]
        _require(usage.num_cached_blocks == blocks["cached"], "a tenant's number of cached blocks drifted")
        _require(usage.num_pinned_blocks == blocks["pinned"], "a tenant's number of pinned blocks drifted")
        _require(usage.num_leased_blocks == blocks["leased"], "a tenant's number of leased blocks drifted")
        _require(usage.num_retained_blocks == blocks["retained"], "a tenant's number of retained blocks drifted")
    pool.check(np.frombuffer(b"".join(leased), dtype=np.int32), np.frombuffer(b"".join(published), dtype=np.int32))


def _num_retained_children(node: Node) -> int:
    return sum(map(is_retained, node.children.values())) if node.children else 0
