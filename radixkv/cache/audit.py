"""Checks a whole cache by recounting everything from its open leases and trees."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable

import numpy as np

from radixkv.blocks import BLOCK_ID_BYTES
from radixkv.cache.block_pool import BlockState
from radixkv.cache.cache_state import CacheState
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node, path_to
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retained_nodes import is_retained
from radixkv.errors import require_invariant
from radixkv.tokens import TOKEN_BYTES

_require_of_tree = functools.partial(require_invariant, "radix tree")
_require = functools.partial(require_invariant, "prefix cache")


def audit(state: CacheState, leases: Iterable[Lease]) -> None:
    """Compare every counter and every index with the leases and the trees. Complexity: O(everything).

    Raises:
        InvariantViolation: the message names the inconsistency.
    """
    pool = state.pool
    tenants = state.tenants
    queue = state.queue
    retained = state.retained
    leases_of: Counter[Node] = Counter()  # by the node that their path ends in
    held_leases_of: Counter[Node] = Counter()  # the same, of held leases only
    leased, published = [], []  # packed block ids
    leases = list(leases)
    blocks_of: dict[str, Counter[str]] = {tenant: Counter() for tenant, _ in tenants.items()}
    for lease in leases:
        leased.append(lease.owned_block_ids.tobytes())
        blocks_of[lease.namespace.tenant]["leased"] += lease.owned_block_ids.size
        blocks_of[lease.namespace.tenant]["held"] += lease.block_ids.size if lease.is_held else 0
        if lease.node is not None:
            leases_of[lease.node] += 1
            held_leases_of[lease.node] += lease.is_held
    pinned_nodes = {above for node in leases_of for above in path_to(node)}
    held_nodes = {above for node in +held_leases_of for above in path_to(node)}
    num_evictable = num_expiring = 0
    for tree in state.trees.values():
        check_tree(tree)
        _require(not tree.root.is_leaf, "an empty tree is kept")
        blocks = blocks_of[tree.owner.namespace.tenant]
        for node in tree.nodes():
            published.append(node.block_ids)
            leased.append(node.retired_block_ids)
            _require(node.ref_count > 0 or not node.retired_block_ids, "an unpinned node keeps a retired block")
            num_pinned_children = sum(child in pinned_nodes for child in (node.children or {}).values())
            ref_count = leases_of.pop(node, 0) + num_pinned_children
            _require(node.ref_count == ref_count, "references are miscounted")
            _require((node in queue) == node.is_evictable, "the eviction queue does not hold exactly the unused leaves")
            _require(_num_retained_children(node) == node.num_retained_children, "retained children are miscounted")
            blocks["retained"] += node.num_blocks if is_retained(node) else 0
            num_held_children = sum(child in held_nodes for child in (node.children or {}).values())
            _require(
                node.held_ref_count == held_leases_of[node] + num_held_children,
                "held references are miscounted",
            )
            blocks["held"] += node.num_blocks if node.held_ref_count else 0
            blocks["cached"] += node.num_blocks
            blocks["pinned"] += node.num_blocks if node.ref_count else 0
            blocks["leased"] += len(node.retired_block_ids) // BLOCK_ID_BYTES
            num_probation_blocks = node.num_blocks if node in queue and queue.is_on_probation(node) else 0
            _require(node.num_probation_blocks == num_probation_blocks, "a leaf is in the wrong eviction queue")
            blocks["probation"] += num_probation_blocks
            num_evictable += node.is_evictable
            num_expiring += node.expiry_entry is not None
            _require(node.renew_s is None or node.expiry_entry is not None, "a node renews a priority without an end")
        pinned_nodes.difference_update(tree.nodes())
    for node in pinned_nodes:
        _require(node.ref_count > 0 and not node.block_ids, "a lease pins a node outside every tree")
        leased.append(node.retired_block_ids)
        blocks_of[node.owner.namespace.tenant]["leased"] += len(node.retired_block_ids) // BLOCK_ID_BYTES
        blocks_of[node.owner.namespace.tenant]["held"] += state.held.num_purged_blocks(node)
    totals = sum(blocks_of.values(), Counter())
    _require(state.pins.num_pinned_blocks == totals["pinned"], "the number of pinned blocks drifted")
    _require(retained.num_blocks == totals["retained"], "the number of retained blocks drifted")
    _require(retained.num_blocks <= retained.max_blocks, "more blocks are retained than allowed")
    _require(retained.num_expiring == num_expiring, "the expiry index holds a node outside every tree")
    _require(queue.num_probation_blocks == totals["probation"], "the number of blocks on probation drifted")
    _require(len(queue) == num_evictable, "the eviction queue holds a node outside every tree")
    _require(state.held.num_blocks == totals["held"], "the number of held blocks drifted")
    _require(state.held.num_blocks <= state.held.max_blocks, "more blocks are held than allowed")
    for tenant, usage in tenants.items():
        blocks = blocks_of[tenant]
        _require(usage.num_held_blocks == blocks["held"], "a tenant's number of held blocks drifted")
        _require(usage.num_cached_blocks == blocks["cached"], "a tenant's number of cached blocks drifted")
        _require(usage.num_pinned_blocks == blocks["pinned"], "a tenant's number of pinned blocks drifted")
        _require(usage.num_leased_blocks == blocks["leased"], "a tenant's number of leased blocks drifted")
        _require(usage.num_probation_blocks == blocks["probation"], "a tenant's blocks on probation drifted")
        _require(usage.num_retained_blocks == blocks["retained"], "a tenant's number of retained blocks drifted")
    free_block_ids = np.flatnonzero(np.frombuffer(pool.states(), dtype=np.uint8) == BlockState.FREE)
    state.windows.check([lease.windows for lease in leases if lease.windows], free_block_ids.astype(np.int32))
    if state.state_slots is not None:
        state.state_slots.check(free_block_ids.astype(np.int32))
    pool.check(np.frombuffer(b"".join(leased), dtype=np.int32), np.frombuffer(b"".join(published), dtype=np.int32))


def check_tree(tree: RadixTree) -> None:
    """Check the shape of every node of a tree. Complexity: O(all tokens).

    Raises:
        InvariantViolation: the message names what is wrong.
    """
    block_bytes = tree.owner.block_size * TOKEN_BYTES
    for node in (tree.root, *tree.nodes()):
        pairs = itertools.pairwise(sorted(node.children or ()))
        _require_of_tree(
            not any(after.startswith(before) for before, after in pairs), "a leaf is a prefix of its sibling"
        )
        is_in_order = node.children is None or node.children.is_in_order()
        _require_of_tree(is_in_order, "the sorted keys differ from the children")
    for node in tree.nodes():
        parent, num_bytes = node.parent, len(node.tokens)
        _require_of_tree(parent is not None and parent.children is not None, "a node has no parent")
        assert parent is not None
        assert parent.children is not None
        is_filed = parent.children.get(node.tokens[:block_bytes]) is node
        _require_of_tree(is_filed, "a node is not filed under its first block")
        _require_of_tree(node.owner is tree.owner, "a node belongs to another tree")
        _require_of_tree(
            node.start_bytes == parent.start_bytes + len(parent.tokens), "a node does not begin where its parent ends"
        )
        _require_of_tree(num_bytes > 0 and num_bytes % TOKEN_BYTES == 0, "a run is not whole tokens")
        _require_of_tree(node.num_blocks * BLOCK_ID_BYTES == len(node.block_ids), "the number of blocks is wrong")
        _require_of_tree(node.num_blocks == -(-num_bytes // block_bytes), "blocks do not cover the run")
        _require_of_tree(node.is_leaf or num_bytes % block_bytes == 0, "an inner node ends inside a block")
        _require_of_tree(node.children is None or len(node.children) > 0, "an empty child table is kept")
        _require_of_tree(node.fingerprint == tree.fingerprint_after(node, 0), "a fingerprint is stale")


def _num_retained_children(node: Node) -> int:
    return sum(map(is_retained, node.children.values())) if node.children else 0
