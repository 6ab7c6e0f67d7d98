"""Keeps leases that outlive their request, until they are released or expire."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from radixkv.cache.kept_blocks import KeptBlocks, Path
from radixkv.cache.lease import Lease
from radixkv.errors import QuotaExceeded, UnknownLease
from radixkv.scheduling.request import Request


class _Held(NamedTuple):
    lease: Lease
    tenant: str
    expires_s: float


class HeldLeases:
    """Open leases by id. An id can't be guessed, and is valid only together with its tenant.

    They are bounded in number, and `kept` bounds their blocks. Of a lease that is held, no tokens stay in memory.

    Args:
        kept: counts the blocks that they keep.
        ttl_s: seconds until a lease expires. It is the same for all, so they expire in the order in which they came.
        max_leases: leases that may be held.
        max_tenant_leases: leases that one tenant may hold.
    """

    def __init__(self, kept: KeptBlocks, ttl_s: float, max_leases: int, max_tenant_leases: int) -> None:
        self._kept = kept
        self._ttl_s = ttl_s
        self._max_leases = max_leases
        self._max_tenant_leases = max_tenant_leases
        self._held: dict[str, _Held] = {}
        self._num_by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def require_room(self, request: Request, path: Path, running: Iterable[Request]) -> None:
        """Refuse a request that could not hold its lease after those of the running requests are held, too.

        Args:
            request: asks to hold its lease; it has none yet.
            path: its blocks.
            running: requests that have blocks.

        Raises:
            QuotaExceeded: its tenant, or all tenants together, would hold too many leases or too many blocks.
        """
        others = [other for other in running if other.params.hold_lease and other is not request]
        own = [other for other in others if other.tenant == request.tenant]
        for whose, num_leases, max_leases in (
            ("this tenant", self._num_by_tenant[request.tenant] + len(own), self._max_tenant_leases),
            ("all tenants", len(self._held) + len(others), self._max_leases),
        ):
            if num_leases >= max_leases:
                raise QuotaExceeded(
                    f"hold_lease: expected fewer than {max_leases} held leases of {whose}, got {num_leases}"
                )
        for tenant, asking in ((request.tenant, own), (None, others)):
            paths = [path, *(Path.of(other.open_lease) for other in asking)]
            self._kept.require_room(tenant, self._kept.num_more(paths))

    def hold(self, lease: Lease, tenant: str, now_s: float) -> tuple[str, float]:
        """Keep a lease open. Returns its id, and the time at which it expires by the clock of `now_s`."""
        lease_id = secrets.token_hex(16)
        lease.keep()
        self._held[lease_id] = _Held(lease, tenant, now_s + self._ttl_s)
        self._num_by_tenant[tenant] += 1
        return lease_id, now_s + self._ttl_s

    def renew(self, lease_id: str, tenant: str, now_s: float) -> float:
        """Let a held lease expire as late as if it came now. Returns when it expires by the clock of `now_s`.

        Raises:
            UnknownLease: never given to this tenant, released before, or expired.
        """
        lease = self._take(lease_id, tenant).lease
        self._held[lease_id] = _Held(lease, tenant, now_s + self._ttl_s)  # the last one to expire
        return now_s + self._ttl_s

    def release(self, lease_id: str, tenant: str) -> None:
        """Close a held lease.

        Raises:
            UnknownLease: never given to this tenant, released before, or expired.
        """
        self._close(self._take(lease_id, tenant))

    def next_expiry_s(self) -> float | None:
        """Return the time at which the next lease expires; None if none is held."""
        return next(iter(self._held.values())).expires_s if self._held else None

    def expire(self, now_s: float) -> None:
        """Close the leases that have expired."""
        while (expires_s := self.next_expiry_s()) is not None and expires_s <= now_s:
            self._close(self._held.pop(next(iter(self._held))))

    def close(self) -> None:
        """Close all of them."""
        while self._held:
            self._close(self._held.popitem()[1])

    def _take(self, lease_id: str, tenant: str) -> _Held:
        held = self._held.get(lease_id)
        if held is None or held.tenant != tenant:
            raise UnknownLease("lease_id: expected a lease that this tenant holds, got an unknown or expired one")
        del self._held[lease_id]
        return held

    def _close(self, held: _Held) -> None:
        self._num_by_tenant[held.tenant] -= 1
        if not self._num_by_tenant[held.tenant]:
            del self._num_by_tenant[held.tenant]
        held.lease.close()
