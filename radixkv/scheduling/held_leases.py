"""Keeps leases that outlive their request, until they are released or expire."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from radixkv.cache.lease import Lease
from radixkv.errors import UnknownLease


class _Held(NamedTuple):
    lease: Lease
    tenant: str
    expires_s: float


class HeldLeases:
    """Open leases by id. An id can't be guessed, and is valid only together with its tenant.

    Args:
        ttl_s: seconds until a lease expires. It is the same for all, so they expire in the order in which they came.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, lease: Lease, tenant: str, now_s: float) -> tuple[str, float]:
        """Keep a lease open. Returns its id, and the time at which it expires by the clock of `now_s`."""
        lease_id = secrets.token_hex(16)
        self._held[lease_id] = _Held(lease, tenant, now_s + self._ttl_s)
        return lease_id, now_s + self._ttl_s

    def release(self, lease_id: str, tenant: str) -> None:
        """Close a held lease.

        Raises:
            UnknownLease: never given to this tenant, released before, or expired.
        """
        held = self._held.get(lease_id)
        if held is None or held.tenant != tenant:
            raise UnknownLease("lease_id: expected a lease that this tenant holds, got an unknown or expired one")
        del self._held[lease_id]
        held.lease.close()

    def next_expiry_s(self) -> float | None:
        """Return the time at which the next lease expires; None if none is held."""
        return next(iter(self._held.values())).expires_s if self._held else None

    def expire(self, now_s: float) -> None:
        """Close the leases that have expired."""
        while (expires_s := self.next_expiry_s()) is not None and expires_s <= now_s:
            self._held.pop(next(iter(self._held))).lease.close()

    def close(self) -> None:
        """Close all of them."""
        for held in self._held.values():
            held.lease.close()
        self._held.clear()
