"""The open leases of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from radixkv.cache.lease import Lease
from radixkv.namespace import PUBLIC_TENANT, Namespace

_Names = tuple[str, str]  # adapter and salt


class OpenLeases:
    """A set of leases, in which those of a namespace are found without a look at the others.

    acme   { ("", ""): { lease, lease }, ("", "salt"): { lease } }
    other  { ("", ""): { lease } }
    """

    def __init__(self) -> None:
        self._leases: set[Lease] = set()
        self._by_tenant: dict[str, dict[_Names, set[Lease]]] = {}

    def __contains__(self, lease: object) -> bool:
        return lease in self._leases

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease: Lease) -> None:
        """Add a lease. Complexity: O(1)."""
        self._leases.add(lease)
        by_names = self._by_tenant.setdefault(lease.namespace.tenant, {})
        by_names.setdefault(_names(lease.namespace), set()).add(lease)

    def remove(self, lease: Lease) -> None:
        """Remove a lease. Complexity: O(1)."""
        self._leases.remove(lease)
        tenant, names = lease.namespace.tenant, _names(lease.namespace)
        by_names = self._by_tenant[tenant]
        by_names[names].remove(lease)
        if not by_names[names]:
            del by_names[names]
            if not by_names:
                del self._by_tenant[tenant]

    def revoke(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Let leases of namespaces with these names publish nothing more; None matches any name.

        Those of public prefixes go on: nobody could mean them.

        Complexity: O(leases revoked); with None for adapter or salt also O(namespaces of the tenant with open leases).
        """
        for each in self._by_tenant if tenant is None else (tenant,):
            if each != PUBLIC_TENANT:
                _revoke(self._by_tenant.get(each, {}), adapter, salt)


def _names(namespace: Namespace) -> _Names:
    return namespace.adapter, namespace.salt


def _revoke(by_names: Mapping[_Names, set[Lease]], adapter: str | None, salt: str | None) -> None:
    """Revoke leases of one tenant."""
    if adapter is not None and salt is not None:
        revoked = [by_names.get((adapter, salt), set())]
    else:
        revoked = [
            leases
            for names, leases in by_names.items()
            if (adapter is None or adapter == names[0]) and (salt is None or salt == names[1])
        ]
    for leases in revoked:
        for lease in leases:
            lease.is_revoked = True
