"""Calls that wait for the engine's thread, in a lane for each who asks."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from radixkv.errors import QueueFull

_RETRY_S = 0.1  # some steps; each runs some calls

_C = TypeVar("_C")


class Lanes(Generic[_C]):
    """Waiting calls by tenant. Tenants take turns, a call each, so that a crowd of calls delays no other tenant's.

        acme   [ call | call | call | ... ]
        other  [ call ]                          take: acme, other, acme, acme ...

    A lane is gone when it is empty; the next call of its tenant begins a new one, after all others.

    Args:
        max_calls: calls that may wait.
        max_tenant_calls: calls of one tenant that may wait.
    """

    def __init__(self, max_calls: int, max_tenant_calls: int) -> None:
        self._max_calls = max_calls
        self._max_tenant_calls = max_tenant_calls
        self._num_calls = 0
        self._lanes: OrderedDict[str, deque[_C]] = OrderedDict()  # the next one to take from is the first

    def __len__(self) -> int:
        return self._num_calls

    def add(self, tenant: str, call: _C) -> None:
        """Let a call wait.

        Raises:
            QueueFull: too many calls wait, or too many of this tenant.

        Complexity: O(1).
        """
        lane = self._lanes.get(tenant)
        if lane is not None:
            _require_room(len(lane), self._max_tenant_calls, " of this tenant")
        _require_room(self._num_calls, self._max_calls, "")
        if lane is None:
            lane = self._lanes[tenant] = deque()
        lane.append(call)
        self._num_calls += 1

    def take(self) -> tuple[str, _C] | None:
        """Take the next call and its tenant; None if no call waits. Complexity: O(1)."""
        if not self._lanes:
            return None
        tenant, lane = self._lanes.popitem(last=False)
        call = lane.popleft()
        if lane:
            self._lanes[tenant] = lane
        self._num_calls -= 1
        return tenant, call

    def put_back(self, tenant: str, call: _C) -> None:
        """Let a call that was taken go on later, before the others of its tenant. Complexity: O(1)."""
        self._lanes.setdefault(tenant, deque()).appendleft(call)
        self._num_calls += 1


def _require_room(num_calls: int, max_calls: int, whose: str) -> None:
    if num_calls >= max_calls:
        raise QueueFull(
            f"engine: expected fewer than {max_calls} waiting calls{whose}, got {num_calls}", retry_after_s=_RETRY_S
        )
