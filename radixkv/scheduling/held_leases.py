"""Keeps leases that outlive their request, until they are released or expire."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

from radixkv.cache.held_blocks import HeldBlocks, Path
from radixkv.cache.prompt_lease import PromptLease
from radixkv.errors import Cause, OutOfBlocks, QuotaExceeded, UnknownLease
from radixkv.scheduling.request import Request


class _Held(NamedTuple):
    lease: PromptLease
    num_tokens: int
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

    def __init__(self, kept: HeldBlocks, ttl_s: float, max_leases: int, max_tenant_leases: int) -> None:
        self._kept = kept
        self._ttl_s = ttl_s
        self._max_leases = max_leases
        self._max_tenant_leases = max_tenant_leases
        self._held: dict[str, _Held] = {}
        self._by_tenant: dict[str, dict[str, None]] = {}  # ids; both in the order in which leases expire

    def __len__(self) -> int:
        return len(self._held)

    def require_room(self, request: Request, path: Path, running: Iterable[Request]) -> None:
        """Refuse a request that could not hold its lease after those of the running requests are held, too.

        Args:
            request: asks to hold its lease; it has none yet.
            path: its blocks.
            running: requests that have blocks.

        Raises:
            QuotaExceeded, OutOfBlocks: its tenant, or all tenants together, would hold too many leases or blocks.
        """
        others = [other for other in running if other.params.hold_lease and other is not request]
        own = [other for other in others if other.tenant == request.tenant]
        for whose, num_leases, max_leases, kind in (
            (
                "this tenant",
                len(self._by_tenant.get(request.tenant, ())) + len(own),
                self._max_tenant_leases,
                QuotaExceeded,
            ),
            ("all tenants", len(self._held) + len(others), self._max_leases, OutOfBlocks),
        ):
            if num_leases >= max_leases:
                raise kind(
                    f"hold_lease: expected fewer than {max_leases} held leases of {whose}, got {num_leases}",
                    cause=Cause.HOLD_LEASE,
                )
        for tenant, asking in ((request.tenant, own), (None, others)):
            paths = [path, *(Path.of(other.open_lease.own) for other in asking)]
            self._kept.require_room(tenant, self._kept.num_more(paths))

    def hold(self, lease: PromptLease, tenant: str, now_s: float) -> tuple[str, float]:
        """Keep a lease open. Returns its id, and the time at which it expires by the clock of `now_s`."""
        lease_id, num_tokens = secrets.token_hex(16), lease.num_tokens
        lease.keep()
        return lease_id, self._add(lease_id, _Held(lease, num_tokens, tenant, now_s + self._ttl_s))

    def lease_of(self, lease_id: str, tenant: str) -> tuple[PromptLease, int]:
        """Return a held lease, and the number of its tokens. Changes nothing.

        Raises:
            UnknownLease: never given to this tenant, released before, or expired.
        """
        held = self._find(lease_id, tenant)
        return held.lease, held.num_tokens

    def renew(self, lease_id: str, tenant: str, now_s: float) -> float:
        """Let a held lease expire as late as if it came now. Returns when it expires by the clock of `now_s`.

        Raises:
            UnknownLease: never given to this tenant, released before, or expired.
        """
        held = self._take(lease_id, tenant)
        return self._add(lease_id, held._replace(expires_s=now_s + self._ttl_s))  # the last one to expire

    def release(self, lease_id: str, tenant: str) -> None:
        """Close a held lease.

        Raises:
            UnknownLease: never given to this tenant, released before, or expired.
        """
        self._take(lease_id, tenant).lease.close()

    def next_expiry_s(self, tenant: str | None = None) -> float | None:
        """Return the time at which the next lease expires, of a tenant or of all (None); None if none is held.

        Complexity: O(1).
        """
        first = next(iter(self._held if tenant is None else self._by_tenant.get(tenant, ())), None)
        return None if first is None else self._held[first].expires_s

    def expire(self, now_s: float) -> None:
        """Close the leases that have expired."""
        while (expires_s := self.next_expiry_s()) is not None and expires_s <= now_s:
            self._close_first()

    def close(self) -> None:
        """Close all of them."""
        while self._held:
            self._close_first()

    def _add(self, lease_id: str, held: _Held) -> float:
        self._held[lease_id] = held
        self._by_tenant.setdefault(held.tenant, {})[lease_id] = None
        return held.expires_s

    def _find(self, lease_id: str, tenant: str) -> _Held:
        held = self._held.get(lease_id)
        if held is None or held.tenant != tenant:
            raise UnknownLease("lease_id: expected a lease that this tenant holds, got an unknown or expired one")
        return held

    def _take(self, lease_id: str, tenant: str) -> _Held:
        held = self._find(lease_id, tenant)
        del self._held[lease_id]
        own = self._by_tenant[tenant]
        del own[lease_id]
        if not own:
            del self._by_tenant[tenant]
        return held

    def _close_first(self) -> None:
        lease_id, held = next(iter(self._held.items()))
        self._take(lease_id, held.tenant).lease.close()
