"""The open leases of a cache."""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.cache.lease import Lease
from radixkv.cache.namespaces.namespace_index import NamespaceIndex


class OpenLeases:
    """A set of leases, in which those of a tenant are found without a look at the others."""

    def __init__(self) -> None:
        self._leases: set[Lease] = set()
        self._index: NamespaceIndex[Lease] = NamespaceIndex()

    def __contains__(self, lease: object) -> bool:
        return lease in self._leases

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease: Lease) -> None:
        """Add a lease. Complexity: O(1)."""
        self._leases.add(lease)
        self._index.add(lease.namespace, lease)

    def remove(self, lease: Lease) -> None:
        """Remove a lease. Complexity: O(1)."""
        self._leases.remove(lease)
        self._index.remove(lease.namespace, lease)

    def revoke(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Let leases of namespaces with these names publish nothing more; None matches any name.

        Complexity: O(open leases of the tenant).
        """
        for lease, namespace in self._index.of(tenant):
            lease.is_revoked = lease.is_revoked or namespace.is_among(tenant, adapter, salt)
