"""The trees of a cache, by namespace."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import TypeVar

from radixkv.cache.node import Owner
from radixkv.cache.radix_tree import RadixTree, RootPrefix
from radixkv.cache.tenants import TenantUsage
from radixkv.namespace import Namespace

_K = TypeVar("_K", bound=Hashable)


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
    """

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size
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


def _public_prefix_key(namespace: Namespace) -> tuple[Namespace, str]:
    """Return the namespace of the prompts, and the serial number of the public prefix above their tree."""
    return namespace._replace(public_prefix=""), namespace.public_prefix.partition(":")[0]


def _remove(trees_by_key: dict[_K, dict[Namespace, RadixTree]], key: _K, namespace: Namespace) -> None:
    """Remove a tree, and the key if it has no other trees."""
    trees = trees_by_key[key]
    del trees[namespace]
    if not trees:
        del trees_by_key[key]
