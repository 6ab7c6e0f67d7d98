"""The trees of a cache, by namespace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TypeVar

from radixkv.cache.node import Node, Owner, path_to
from radixkv.cache.radix_tree import RadixTree, RootPrefix
from radixkv.cache.tenants import TenantUsage
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES

_K = TypeVar("_K", bound=Hashable)

# Paths of more nodes are not split further: each node costs every request that uses the path a microsecond.
_MAX_CUT_NODES = 256


class NamespaceTrees(dict[Namespace, RadixTree]):
    """The tree of each namespace that has a cached token. Change it only by `create` and `del`.

    The trees of one tenant can be listed without iterating over those of others. Below a public prefix, a namespace has
    one tree for each position at which its prompts leave the prefix:

        (public)   [ system prompt ................ ]
                             │                     │
        acme                 └─ tree               └─ tree        two trees of the same tenant: its prompts leave the
        other                                      └─ tree        prefix at two positions

    Args:
        block_size: tokens per block.
        on_cut: called with the lower half of each node that `cut` has split.
    """

    def __init__(self, block_size: int, on_cut: Callable[[Node], None]) -> None:
        super().__init__()
        self._block_size = block_size
        self._on_cut = on_cut
        self._by_tenant: dict[str, dict[Namespace, RadixTree]] = {}
        self._by_public_prefix: dict[tuple[Namespace, str], dict[Namespace, RadixTree]] = {}  # by `_public_prefix_key`

    def create(self, namespace: Namespace, usage: TenantUsage, root_prefix: RootPrefix) -> RadixTree:
        """Add an empty tree.

        Args:
            namespace: namespace of the tree.
            usage: counters of its tenant.
            root_prefix: the part of a public prefix above the tree; empty for most trees.
        """
        tree = self[namespace] = RadixTree(Owner(namespace, usage, self._block_size), root_prefix)
        self._by_tenant.setdefault(namespace.tenant, {})[namespace] = tree
        if namespace.public_prefix:
            self._by_public_prefix.setdefault(_public_prefix_key(namespace), {})[namespace] = tree
        return tree

    def __delitem__(self, namespace: Namespace) -> None:
        super().__delitem__(namespace)
        _remove(self._by_tenant, namespace.tenant, namespace)
        if namespace.public_prefix:
            _remove(self._by_public_prefix, _public_prefix_key(namespace), namespace)

    def of_tenant(self, tenant: str | None) -> list[RadixTree]:
        """List the trees of a tenant; of all tenants for None. Complexity: O(trees listed)."""
        return list(self.values() if tenant is None else self._by_tenant.get(tenant, {}).values())

    def below(self, namespace: Namespace, serial: str) -> Collection[RadixTree]:
        """List the trees of a namespace below a public prefix. Complexity: O(1).

        Args:
            namespace: the namespace of the prompts, without a public prefix.
            serial: the serial number of the public prefix.
        """
        return self._by_public_prefix.get((namespace, serial), {}).values()

    def cut(self, node: Node, num_blocks: int) -> Node:
        """Split a node after its first `num_blocks` blocks, although no prompt diverges there. Returns the upper half.

        Complexity: O(depth + tokens of the path).
        """
        upper = self[node.owner.namespace].cut(node, num_blocks)
        self._on_cut(node)
        return upper

    def nodes_in_range(self, node: Node, start: int, end: int) -> list[Node]:
        """List the nodes that hold the blocks `[start, end)` of a node's path, as `cut_range` does.

        A path of more than 256 nodes is not split: only its nodes all of whose blocks are in the range are listed.
        """
        path = path_to(node)
        return _whole_nodes(path, start, end) if len(path) > _MAX_CUT_NODES else self._cut_path(path, start, end)

    def cut_range(self, node: Node, start: int, end: int) -> list[Node]:
        """List the nodes that hold the blocks `[start, end)` of a node's path, after splitting nodes at both ends.

        Complexity: O(depth), and two cuts.
        """
        return self._cut_path(path_to(node), start, end)

    def _cut_path(self, path: list[Node], start: int, end: int) -> list[Node]:
        nodes = []
        end_block = _first_block(path)
        for node in path:
            first_block, end_block = end_block, end_block + node.num_blocks
            if first_block < end < end_block:
                node = self.cut(node, end - first_block)
            if first_block < start < end_block:
                self.cut(node, start - first_block)  # `node` is the lower half now
            if start < end_block and first_block < end:
                nodes.append(node)
        return nodes


def _public_prefix_key(namespace: Namespace) -> tuple[Namespace, str]:
    """Return the namespace of the prompts, and the serial number of the public prefix above their tree."""
    return namespace._replace(public_prefix=""), namespace.public_prefix.partition(":")[0]


def _remove(trees_by_key: dict[_K, dict[Namespace, RadixTree]], key: _K, namespace: Namespace) -> None:
    """Remove a tree, and the key if it has no other trees."""
    trees = trees_by_key[key]
    del trees[namespace]
    if not trees:
        del trees_by_key[key]


def _first_block(path: list[Node]) -> int:
    """Return the position of the first block of a path: after the blocks of a public prefix above its tree."""
    return path[0].start_bytes // (path[0].owner.block_size * TOKEN_BYTES) if path else 0


def _whole_nodes(path: list[Node], start: int, end: int) -> list[Node]:
    """List the nodes all of whose blocks are in `[start, end)`.

    The list is empty if the block `start` is inside a node.
    """
    nodes: list[Node] = []
    end_block = _first_block(path)
    for node in path:
        first_block, end_block = end_block, end_block + node.num_blocks
        if first_block == start or nodes:
            if end_block > end:
                break
            nodes.append(node)
    return nodes
