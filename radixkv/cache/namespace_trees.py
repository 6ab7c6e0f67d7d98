"""The trees of a cache, by namespace."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from radixkv.cache.node import Owner
from radixkv.cache.radix_tree import RadixTree, RootRun
from radixkv.cache.tenants import TenantUsage
from radixkv.namespace import Namespace

_V = TypeVar("_V", bound=Hashable)


class NamespaceIndex(Generic[_V]):
    """Values by namespace. Those of one tenant can be listed without iterating over those of others.

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
    """The tree of each namespace that has a cached token. Change it only by `plant` and `del`.

    Below a public prefix, a namespace has one tree for each position at which its prompts leave the prefix:

        (public)   [ system prompt ................ ]
                             │                     │
        acme                 └─ [own]              ├─ [own] ─ [own]     the root of each tree holds the tokens above it
        other                                      └─ [own]

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size
        self._index: NamespaceIndex[RadixTree] = NamespaceIndex()
        # Trees below a public prefix, by the namespace of the prompts and the prefix's serial, and by the position.
        self._below: dict[tuple[Namespace, str], dict[str, RadixTree]] = {}

    def plant(self, namespace: Namespace, usage: TenantUsage, root_run: RootRun) -> RadixTree:
        """Add an empty tree.

        Args:
            namespace: of the tree.
            usage: counters of its tenant.
            root_run: the part of a public prefix above the tree; empty for most trees.
        """
        tree = self[namespace] = RadixTree(Owner(namespace, usage, self._block_size), root_run)
        self._index.add(namespace, tree)
        if namespace.public_prefix:
            self._below.setdefault(_prefix_of(namespace), {})[namespace.public_prefix] = tree
        return tree

    def __delitem__(self, namespace: Namespace) -> None:
        self._index.remove(namespace, self[namespace])
        super().__delitem__(namespace)
        if namespace.public_prefix:
            below = self._below[_prefix_of(namespace)]
            del below[namespace.public_prefix]
            if not below:
                del self._below[_prefix_of(namespace)]

    def of(self, tenant: str | None) -> list[tuple[RadixTree, Namespace]]:
        """List the trees of a tenant; of all tenants for None. Complexity: O(trees listed)."""
        return self._index.of(tenant)

    def below(self, namespace: Namespace, serial: str) -> Collection[RadixTree]:
        """List the trees of a namespace below a public prefix. Complexity: O(1)."""
        return self._below.get((namespace, serial), {}).values()


def _prefix_of(namespace: Namespace) -> tuple[Namespace, str]:
    """Return the namespace of the prompts, and the serial of the public prefix above their tree."""
    return namespace._replace(public_prefix=""), namespace.public_prefix.partition(":")[0]
