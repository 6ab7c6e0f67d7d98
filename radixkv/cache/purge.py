"""Purges or drops namespaces, and purges cached tokens that were computed with an invoked adapter."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from radixkv.cache.evictor import Evictor
from radixkv.cache.lease import OpenLeases
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.node import NO_PLACE
from radixkv.cache.segment_index import SegmentIndex
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace

# Work of one slice on the engine's thread: examining 1,024 namespaces takes 0.5 ms, purging 128 nodes 2 ms. Nodes that
# leases use are purged at once, per namespace.
_MAX_EXAMINED = 1024
_MAX_PURGED = 128

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
    """Purge the namespaces with these names, None for any, in slices of bounded work. Each slice ends with a `yield`.

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
    freed_blocks = pinned_blocks = num_examined = num_purged = 0
    for tree in trees.of_tenant(tenant):
        namespace = tree.owner.namespace
        if num_examined >= _MAX_EXAMINED or num_purged >= _MAX_PURGED:
            num_examined = num_purged = 0
            yield
        num_examined += 1
        if not namespace.is_among(tenant, None if namespace in invoking else adapter, salt):
            continue
        while trees.get(namespace) is tree:
            num_nodes, freed = evictor.purge_leaves(tree, _MAX_PURGED - num_purged)
            num_purged += num_nodes
            freed_blocks += freed
            if num_purged < _MAX_PURGED:
                break
            num_examined = num_purged = 0
            yield
        if trees.get(namespace) is tree:
            num_nodes, pinned = evictor.purge(tree)
            num_purged += num_nodes
            pinned_blocks += pinned
            # Revoke leases that were opened since the first slice.
            leases.revoke(namespace.tenant, namespace.adapter, namespace.salt)
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
    num_blocks = num_examined = num_dropped = 0
    are_any_left = False
    for tree in trees.of_tenant(tenant):
        namespace = tree.owner.namespace
        is_addressed, is_done = namespace.is_among(tenant, adapter, salt), False
        num_examined += 1
        while not is_done:
            if num_examined >= _MAX_EXAMINED or num_dropped >= _MAX_PURGED:
                num_examined = num_dropped = 0
                yield
            if not is_addressed or trees.get(namespace) is not tree:
                break
            max_nodes = _MAX_PURGED - num_dropped
            num_nodes, freed = evictor.purge_leaves(tree, max_nodes, evicts=evicts)
            num_blocks += freed
            num_dropped += num_nodes
            is_done = num_nodes < max_nodes
        are_any_left = are_any_left or (is_addressed and trees.get(namespace) is tree)
    return num_blocks, are_any_left


def sweep(
    segments: SegmentIndex, evictor: Evictor, marks: InvocationMarks, digest: str
) -> Generator[None, None, Purged]:
    """Purge unused blocks that were computed with an invoked adapter, in slices that end with a `yield`.

    The caller ensures that no request uses the adapter any more. Blocks of held leases remain until they are evicted.

    Complexity: O(nodes of the cache), and O(log leaves) for each node that is purged.
    """
    freed_blocks = num_purged = 0
    for nodes in segments.slices():
        for node in nodes:
            while node.place != NO_PLACE and node.is_evictable and marks.digest_of(node.tokens) == digest:
                above = node.parent
                assert above is not None, "a root has no blocks"
                num_kept_blocks = marks.num_plain(node.tokens) // node.owner.block_size
                freed_blocks += evictor.purge_end(node, num_kept_blocks)
                num_purged += 1
                if num_purged >= _MAX_PURGED:
                    num_purged = 0
                    yield
                node = above
        yield
    return Purged(freed_blocks, 0)


def all_slices(slices: Generator[None, None, _T]) -> _T:
    """Run all slices of a purge at once, and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: _T = end.value
            return result
