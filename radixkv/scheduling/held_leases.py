"""Held leases, which outlive their request until they are released or expire."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

from radixkv.cache.held_blocks import HeldBlocks, HeldPath
from radixkv.cache.lease import Lease
from radixkv.errors import Cause, OutOfBlocks, QuotaExceeded, UnknownLease
from radixkv.scheduling.request import Request


class _HeldLease(NamedTuple):
    lease: Lease
    num_tokens: int
    tenant: str
    expires_s: float


class HeldLeases:
    """Open leases by id. An id cannot be guessed, and is valid only together with its tenant.

    The number of leases is bounded, and `blocks` bounds their blocks. The token ids of a held lease are not stored.

    Args:
        blocks: counts and bounds the blocks of held leases.
        ttl_s: seconds until a lease expires. It is the same for all, so leases expire in the order in which they were
            held or last renewed.
        max_leases: leases that may be held.
        max_tenant_leases: leases that one tenant may hold.
    """

    def __init__(self, blocks: HeldBlocks, ttl_s: float, max_leases: int, max_tenant_leases: int) -> None:
        self._blocks = blocks
        self._ttl_s = ttl_s
        self._max_leases = max_leases
        self._max_tenant_leases = max_tenant_leases
        self._held: dict[str, _HeldLease] = {}
        self._by_tenant: dict[str, dict[str, None]] = {}  # ids; both dicts are in the order in which leases expire

    def __len__(self) -> int:
        return len(self._held)

    def require_room(self, request: Request, path: HeldPath, running: Iterable[Request]) -> None:
        """Refuse a request that could not hold its lease if all running requests with `hold_lease` held theirs as well.

        Args:
            request: the request, which has `hold_lease` and no lease yet.
            path: the blocks that its lease would keep.
            running: requests that have blocks.

        Raises:
            QuotaExceeded, OutOfBlocks: its tenant, or all tenants together, would hold too many leases or blocks.
        """
        future_holders = [other for other in running if other.params.hold_lease and other is not request]
        own_holders = [holder for holder in future_holders if holder.tenant == request.tenant]
        num_own = len(self._by_tenant.get(request.tenant, ())) + len(own_holders)
        if num_own >= self._max_tenant_leases:
            raise QuotaExceeded(
                f"hold_lease: expected fewer than {self._max_tenant_leases} held leases of this tenant, got {num_own}",
                cause=Cause.HOLD_LEASE,
            )
        num_all = len(self._held) + len(future_holders)
        if num_all >= self._max_leases:
            raise OutOfBlocks(
                f"hold_lease: expected fewer than {self._max_leases} held leases of all tenants, got {num_all}",
                cause=Cause.HOLD_LEASE,
            )
        for tenant, holders in ((request.tenant, own_holders), (None, future_holders)):
            paths = [path, *(HeldPath.of(holder.open_lease) for holder in holders)]
            self._blocks.require_room(tenant, self._blocks.num_blocks_to_add(paths))

    def hold(self, lease: Lease, tenant: str, now_s: float) -> tuple[str, float]:
        """Keep a lease open. Returns its new id, and when it expires on the clock of `now_s`."""
        lease_id = secrets.token_hex(16)
        num_tokens = lease.num_tokens
        lease.hold()
        return lease_id, self._add(lease_id, _HeldLease(lease, num_tokens, tenant, now_s + self._ttl_s))

    def lease_of(self, lease_id: str, tenant: str) -> tuple[Lease, int]:
        """Return a held lease, and the number of its tokens. Changes nothing.

        Raises:
            UnknownLease: this tenant never held the lease, or it was released or has expired.
        """
        held = self._find(lease_id, tenant)
        return held.lease, held.num_tokens

    def renew(self, lease_id: str, tenant: str, now_s: float) -> float:
        """Restart the time to live of a held lease. Returns when it expires on the clock of `now_s`.

        Raises:
            UnknownLease: this tenant never held the lease, or it was released or has expired.
        """
        held = self._take(lease_id, tenant)
        return self._add(lease_id, held._replace(expires_s=now_s + self._ttl_s))  # the last one to expire

    def release(self, lease_id: str, tenant: str) -> None:
        """Close a held lease.

        Raises:
            UnknownLease: this tenant never held the lease, or it was released or has expired.
        """
        self._take(lease_id, tenant).lease.close()

    def next_expiry_s(self, tenant: str | None = None) -> float | None:
        """Return when the next lease of a tenant, or of all tenants (None), expires; None if none is held.

        Complexity: O(1).
        """
        first_id = next(iter(self._held if tenant is None else self._by_tenant.get(tenant, ())), None)
        return None if first_id is None else self._held[first_id].expires_s

    def expire(self, now_s: float) -> None:
        """Close the leases that have expired."""
        while self._held and next(iter(self._held.values())).expires_s <= now_s:
            self._close_first()

    def close(self) -> None:
        """Close all held leases."""
        while self._held:
            self._close_first()

    def _add(self, lease_id: str, held: _HeldLease) -> float:
        self._held[lease_id] = held
        self._by_tenant.setdefault(held.tenant, {})[lease_id] = None
        return held.expires_s

    def _find(self, lease_id: str, tenant: str) -> _HeldLease:
        held = self._held.get(lease_id)
        if held is None or held.tenant != tenant:
            raise UnknownLease("lease_id: expected a lease that this tenant holds, got an unknown or expired one")
        return held

    def _take(self, lease_id: str, tenant: str) -> _HeldLease:
        held = self._find(lease_id, tenant)
        del self._held[lease_id]
        ids_of_tenant = self._by_tenant[tenant]
        del ids_of_tenant[lease_id]
        if not ids_of_tenant:
            del self._by_tenant[tenant]
        return held

    def _close_first(self) -> None:
        lease_id, held = next(iter(self._held.items()))
        self._take(lease_id, held.tenant).lease.close()
