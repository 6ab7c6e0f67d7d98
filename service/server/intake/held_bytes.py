"""Bytes that calls under way hold, shared by tenants."""

from __future__ import annotations

from collections import Counter

from radixkv.errors import QueueFull

_RETRY_S = 1.0


class HeldBytes:
    """Counts the bytes of requests and answers in memory, by tenant.

    While there is room, anybody may take. Once `most_bytes` are held, a tenant that holds an equal share of them is
    refused, and one that holds less is not. At twice `most_bytes` everybody is, unless nothing is held.

    Args:
        most_bytes: see above.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._by_tenant: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return self._num_bytes

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a tenant.

        Raises:
            QueueFull: too many are held, and this tenant has its share of them.
        """
        held, num_after = self._by_tenant.get(tenant, 0), self._num_bytes + num_bytes
        share = self._most_bytes // (len(self._by_tenant) + (not held))
        if num_after > self._most_bytes and held and held + num_bytes > share:
            raise QueueFull(
                f"service: expected at most {share} bytes of this tenant's requests and unsent answers, got "
                f"{held + num_bytes}",
                retry_after_s=_RETRY_S,
            )
        if num_after > 2 * self._most_bytes and self._num_bytes:
            raise QueueFull(
                f"service: expected at most {2 * self._most_bytes} bytes of requests and unsent answers, got more",
                retry_after_s=_RETRY_S,
            )
        self._by_tenant[tenant] = held + num_bytes
        self._num_bytes += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Forget bytes that were taken."""
        self._num_bytes -= num_bytes
        self._by_tenant[tenant] -= num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
