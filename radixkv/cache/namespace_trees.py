"""The trees of a cache."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES, require_tokens

_V = TypeVar("_V", bound=Hashable)


class NamespaceIndex(Generic[_V]):
    """Finds the values of a tenant's namespaces without a look at those of others.

    acme   { tree: (model, acme, "", ""), tree: (model, acme, "", "salt") }
    other  { tree: (model, other, "", "") }
    """

    def __init__(self) -> None:
        self._by_tenant: dict[str, dict[_V, Namespace]] = {}

    def add(self, namespace: Namespace, value: _V) -> None:
        """Add a value. Complexity: O(1)."""
        self._by_tenant.setdefault(namespace.tenant, {})[value] = namespace

    def remove(self, namespace: Namespace, value: _V) -> None:
        """Remove a value that was added with this namespace. Complexity: O(1)."""
        values = self._by_tenant[namespace.tenant]
        del values[value]
        if not values:
            del self._by_tenant[namespace.tenant]

    def of(self, tenant: str | None) -> list[tuple[_V, Namespace]]:
        """List the values of a tenant; of all tenants for None. Complexity: O(values listed)."""
        if tenant is not None:
            return list(self._by_tenant.get(tenant, {}).items())
        return [item for values in self._by_tenant.values() for item in values.items()]


class NamespaceTrees(dict[Namespace, RadixTree]):
    """The tree of each namespace that has a cached token. Item assignment and `del` are the only ways to change it.

    Args:
        parts: say how much of what is found can be reused.
    """

    def __init__(self, parts: WindowedLayers) -> None:
        super().__init__()
        self._parts = parts
        self._index: NamespaceIndex[RadixTree] = NamespaceIndex()
        # Those that hang below a public prefix, by the namespace of prompts and the prefix's serial, and by the trunk.
        self._hung: dict[tuple[Namespace, str], dict[str, RadixTree]] = {}

    def __setitem__(self, namespace: Namespace, tree: RadixTree) -> None:
        super().__setitem__(namespace, tree)
        self._index.add(namespace, tree)
        if namespace.trunk:
            self._hung.setdefault(_below(namespace), {})[namespace.trunk] = tree

    def __delitem__(self, namespace: Namespace) -> None:
        self._index.remove(namespace, self[namespace])
        super().__delitem__(namespace)
        if namespace.trunk:
            hung = self._hung[_below(namespace)]
            del hung[namespace.trunk]
            if not hung:
                del self._hung[_below(namespace)]

    def of(self, tenant: str | None) -> list[tuple[RadixTree, Namespace]]:
        """List the trees of a tenant; of all tenants for None. Complexity: O(trees listed)."""
        return self._index.of(tenant)

    def hung(self, namespace: Namespace, serial: str) -> Collection[RadixTree]:
        """List the trees of a namespace below a public prefix. Complexity: O(1)."""
        return self._hung.get((namespace, serial), {}).values()

    def find(self, namespace: Namespace, tokens: bytes, read: bool = True) -> tuple[Node | None, int, int, bytes, int]:
        """Look a prompt up in the tree of a namespace. With `read` False nothing is found.

        Returns:
            The deepest node that shares tokens, None if none does; bytes found; tokens that can be reused; the packed
            ids of their blocks; and the number of nodes of the path.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.
        """
        require_tokens(tokens)
        tree = self.get(namespace) if read else None
        if tree is None:
            return None, 0, 0, b"", 0
        node, num_bytes, packed, num_nodes = tree.match(tokens)
        cached_tokens = min(num_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES
        cached_tokens = self._parts.longest(packed, cached_tokens)
        return node if cached_tokens else None, num_bytes, cached_tokens, packed, num_nodes

    def has_more(self, namespace: Namespace, tokens: bytes, cached_tokens: int) -> bool:
        """Whether more of a prompt is cached than can be reused, because parts of it were given up."""
        tree = self.get(namespace)
        return bool(self._parts.pools) and tree is not None and tree.match(tokens)[1] > cached_tokens * TOKEN_BYTES


def _below(namespace: Namespace) -> tuple[Namespace, str]:
    """Return the namespace of the prompts whose tree this is, and the serial of the prefix below which it hangs."""
    return namespace._replace(trunk=""), namespace.trunk.partition(":")[0]
