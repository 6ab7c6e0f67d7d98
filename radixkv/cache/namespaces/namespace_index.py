"""Values of namespaces, by tenant."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from radixkv.namespace import Namespace

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
