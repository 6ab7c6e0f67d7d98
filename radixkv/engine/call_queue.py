"""A queue of calls in which tenants take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from radixkv.errors import QueueFull

# Seconds after which a refused caller should retry: the duration of a few steps, between which calls run.
RETRY_AFTER_S = 0.1

_C = TypeVar("_C")


class FairCallQueue(Generic[_C]):
    """Waiting calls of all tenants.

    Tenants take turns, one call each. So a tenant with many calls delays others by no more than a tenant with one.

        acme   [ call | call | call | ... ]
        other  [ call ]                          take: acme, other, acme, acme ...

    A tenant whose call was taken has its next turn after all other tenants. When the queue is full, a new call of a
    tenant replaces the newest call of the tenant with the most calls, if that tenant has at least two calls more than
    the tenant of the new call. So fewer than `max_calls` tenants cannot keep another one out.

    Args:
        max_calls: calls that may wait.
        max_tenant_calls: calls of one tenant that may wait.
    """

    def __init__(self, max_calls: int, max_tenant_calls: int) -> None:
        self._max_calls = max_calls
        self._max_tenant_calls = max_tenant_calls
        self._num_calls = 0
        self._by_tenant: OrderedDict[str, deque[_C]] = OrderedDict()  # the next tenant's turn comes first
        self._tenants_by_length: dict[int, dict[str, None]] = {}
        self._max_length = 0

    def __len__(self) -> int:
        return self._num_calls

    def add(self, tenant: str, call: _C) -> _C | None:
        """Queue a call.

        Returns:
            The call that was removed to make room; None if there was room.

        Raises:
            QueueFull: too many calls of this tenant wait, or the queue is full and no other tenant has at least two
                calls more than this one.

        Complexity: O(1).
        """
        num_own = len(self._by_tenant.get(tenant, ()))
        _require_room(num_own, self._max_tenant_calls, " of this tenant")
        removed = None
        if self._num_calls >= self._max_calls:
            if num_own + 1 >= self._max_length:
                _require_room(self._num_calls, self._max_calls, "")
            removed = self._remove_newest()
        self._by_tenant.setdefault(tenant, deque()).append(call)
        self._update_length(tenant, num_own, num_own + 1)
        return removed

    def _remove_newest(self) -> _C:
        """Remove the newest call of a tenant with the most calls, which keeps at least one."""
        tenant = next(reversed(self._tenants_by_length[self._max_length]))
        calls = self._by_tenant[tenant]
        call = calls.pop()
        self._update_length(tenant, len(calls) + 1, len(calls))
        return call

    def take(self) -> tuple[str, _C] | None:
        """Take the next call and its tenant; None if no call waits. Complexity: O(1)."""
        if not self._by_tenant:
            return None
        tenant, calls = self._by_tenant.popitem(last=False)
        call = calls.popleft()
        if calls:
            self._by_tenant[tenant] = calls
        self._update_length(tenant, len(calls) + 1, len(calls))
        return tenant, call

    def put_back(self, tenant: str, call: _C) -> None:
        """Return an unfinished call to the front of its tenant's queue. Complexity: O(1)."""
        calls = self._by_tenant.setdefault(tenant, deque())
        calls.appendleft(call)
        self._update_length(tenant, len(calls) - 1, len(calls))

    def _update_length(self, tenant: str, before: int, after: int) -> None:
        """Record that a tenant has one call more, or one less."""
        self._num_calls += after - before
        if before:
            same_length = self._tenants_by_length[before]
            del same_length[tenant]
            if not same_length:
                del self._tenants_by_length[before]
        if after:
            self._tenants_by_length.setdefault(after, {})[tenant] = None
        if after > self._max_length or self._max_length not in self._tenants_by_length:
            self._max_length = after


def _require_room(num_calls: int, max_calls: int, scope_suffix: str) -> None:
    if num_calls >= max_calls:
        raise QueueFull(
            f"engine: expected fewer than {max_calls} waiting calls{scope_suffix}, got {num_calls}",
            retry_after_s=RETRY_AFTER_S,
        )
