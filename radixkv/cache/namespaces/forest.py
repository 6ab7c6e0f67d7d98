"""The trees of a cache."""

from __future__ import annotations

from radixkv.cache.namespaces.namespace_index import NamespaceIndex
from radixkv.cache.tree.radix_tree import RadixTree
from radixkv.namespace import Namespace


class Forest(dict[Namespace, RadixTree]):
    """The tree of each namespace that has a cached token. Item assignment and `del` are the only ways to change it."""

    def __init__(self) -> None:
        super().__init__()
        self._index: NamespaceIndex[RadixTree] = NamespaceIndex()

    def __setitem__(self, namespace: Namespace, tree: RadixTree) -> None:
        super().__setitem__(namespace, tree)
        self._index.add(namespace, tree)

    def __delitem__(self, namespace: Namespace) -> None:
        self._index.remove(namespace, self[namespace])
        super().__delitem__(namespace)

    def of(self, tenant: str | None) -> list[tuple[RadixTree, Namespace]]:
        """List the trees of a tenant; of all tenants for None. Complexity: O(trees listed)."""
        return self._index.of(tenant)
