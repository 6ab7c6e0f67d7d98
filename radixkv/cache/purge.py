"""Purges or drops namespaces, and purges cached tokens that were computed with an invoked adapter."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from radixkv.cache.evictor import Evictor
from radixkv.cache.lease import OpenLeases
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.node import NO_NUMBER
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.segment_index import SegmentIndex
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace

# Work of one slice on the engine's thread: examining 1,024 namespaces takes 0.5 ms, removing 128 nodes 2 ms. Nodes that
# leases use are purged at once, per namespace.
_MAX_EXAMINED = 1024
_MAX_REMOVED = 128

_T = TypeVar("_T")


class Purged(NamedTuple):
    """The outcome of a purge.

    Attributes:
        freed_blocks: blocks that are free now.
        pinned_blocks: blocks that open leases still use. They cannot be matched, and become free with those leases.
        stored_blocks: blocks that each tier has deleted; None if it could not be reached.
    """

    freed_blocks: int
    pinned_blocks: int
    stored_blocks: Mapping[str, int | None] = MappingProxyType({})


def purge(
    trees: NamespaceTrees,
    leases: OpenLeases,
    evictor: Evictor,
    segments: SegmentIndex,
    tenant: str | None,
    adapter: str | None,
    salt: str | None,
) -> Generator[None, None, Purged]:
    """Purge the namespaces with these names (None matches any name), in slices of bounded work that end with a `yield`.

    If the adapter was invoked in the middle of prompts, the namespaces of the base model that contain tokens computed
    with it are purged as well.

    After the last slice, nothing that was cached before the first one can be matched. The cache may be used between
    slices. A lease that was opened before the first slice can publish no more blocks, nor can a later lease that
    uses purged nodes.

    Complexity: O(open leases of the tenant + namespaces of the tenant + nodes purged * log leaves); without a tenant,
    all leases and namespaces.
    """
    leases.revoke(tenant, adapter, salt)
    invoking: set[Namespace] = set()
    if adapter:
        invoking = yield from segments.namespaces_invoking(adapter)
    pinned_blocks = 0

    def is_purged(namespace: Namespace) -> bool:
        return namespace.is_among(tenant, None if namespace in invoking else adapter, salt)

    def purge_rest(tree: RadixTree) -> int:
        nonlocal pinned_blocks
        num_nodes, num_blocks = evictor.purge(tree)
        pinned_blocks += num_blocks
        namespace = tree.owner.namespace
        leases.revoke(namespace.tenant, namespace.adapter, namespace.salt)  # those opened since the first slice
        return num_nodes

    freed_blocks = yield from _remove_unused_in_slices(trees, evictor, tenant, is_purged, purge_rest)
    return Purged(freed_blocks, pinned_blocks)


def drop_unused(
    trees: NamespaceTrees, evictor: Evictor, tenant: str, adapter: str | None, salt: str | None, *, evicts: bool
) -> Generator[None, None, tuple[int, bool]]:
    """Drop the blocks of a tenant's namespaces that no lease uses, in slices of bounded work that end with a `yield`.

    In contrast to `purge`, leases may publish in these namespaces before and afterwards, and what they publish between
    two slices may stay.

    Args:
        trees, evictor: of the cache.
        tenant: the tenant.
        adapter, salt: names of the namespaces; None for any.
        evicts: whether tiers save the blocks, as they do when blocks are evicted.

    Returns:
        The number of dropped blocks, and whether any stay because leases use them.

    Complexity: O(namespaces of the tenant + nodes dropped * log leaves + nodes that leases use).
    """
    are_any_left = False

    def note_remaining(tree: RadixTree) -> int:
        nonlocal are_any_left
        are_any_left = True
        return 0

    num_blocks = yield from _remove_unused_in_slices(
        trees,
        evictor,
        tenant,
        lambda namespace: namespace.is_among(tenant, adapter, salt),
        note_remaining,
        evicts=evicts,
    )
    return num_blocks, are_any_left


def _remove_unused_in_slices(
    trees: NamespaceTrees,
    evictor: Evictor,
    tenant: str | None,
    is_addressed: Callable[[Namespace], bool],
    on_remaining: Callable[[RadixTree], int],
    *,
    evicts: bool = False,
) -> Generator[None, None, int]:
    """Remove the nodes of some namespaces that no lease uses, in slices of bounded work that end with a `yield`.

    Args:
        trees, evictor: of the cache.
        tenant: the tenant; None for all tenants.
        is_addressed: returns whether a namespace is one of them.
        on_remaining: called with each tree of which leases use nodes; returns the number of nodes that it has removed.
        evicts: as in `drop_unused`.

    Returns:
        The number of freed blocks, without those that `on_remaining` has freed.
    """
    num_blocks = num_examined = num_removed = 0
    for tree in trees.of_tenant(tenant):
        namespace = tree.owner.namespace
        if num_examined >= _MAX_EXAMINED or num_removed >= _MAX_REMOVED:
            num_examined = num_removed = 0
            yield
        num_examined += 1
        if not is_addressed(namespace):
            continue
        while trees.get(namespace) is tree:
            num_nodes, num_freed_blocks = evictor.purge_leaves(tree, _MAX_REMOVED - num_removed, evicts=evicts)
            num_removed += num_nodes
            num_blocks += num_freed_blocks
            if num_removed < _MAX_REMOVED:
                break
            num_examined = num_removed = 0
            yield
        if trees.get(namespace) is tree:
            num_removed += on_remaining(tree)
    return num_blocks


def purge_invoked(
    segments: SegmentIndex, evictor: Evictor, marks: InvocationMarks, digest: str
) -> Generator[None, None, Purged]:
    """Purge unused blocks that were computed with an invoked adapter, in slices that end with a `yield`.

    The caller ensures that no request uses the adapter any more. Blocks of held leases remain until they are evicted.

    Complexity: O(nodes of the cache), and O(log leaves) for each node that is purged.
    """
    freed_blocks = num_purged = 0
    for nodes in segments.slices():
        for node in nodes:
            while node.segment_number != NO_NUMBER and node.is_evictable and marks.digest_of(node.tokens) == digest:
                above = node.parent
                assert above is not None, "a root has no blocks"
                num_kept_blocks = marks.num_plain(node.tokens) // node.owner.block_size
                freed_blocks += evictor.purge_end(node, num_kept_blocks)
                num_purged += 1
                if num_purged >= _MAX_REMOVED:
                    num_purged = 0
                    yield
                node = above
        yield
    return Purged(freed_blocks, 0)


def all_slices(slices: Generator[None, None, _T]) -> _T:
    """Run all slices of a generator at once, such as those of a purge, and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: _T = end.value
            return result
