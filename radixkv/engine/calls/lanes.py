"""Calls that wait for the engine's thread, in a lane for each who asks."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from radixkv.errors import QueueFull

RETRY_S = 0.1  # some steps; each runs some calls

_C = TypeVar("_C")


class Lanes(Generic[_C]):
    """Waiting calls by tenant. Tenants take turns, a call each, so that a crowd of calls delays no other tenant's.

        acme   [ call | call | call | ... ]
        other  [ call ]                          take: acme, other, acme, acme ...

    A lane is gone when it is empty; the next call of its tenant begins a new one, after all others. When no more calls
    may wait, the newest call of the longest lane makes room, so that no tenants can keep another one out.

    Args:
        max_calls: calls that may wait.
        max_tenant_calls: calls of one tenant that may wait.
    """

    def __init__(self, max_calls: int, max_tenant_calls: int) -> None:
        self._max_calls = max_calls
        self._max_tenant_calls = max_tenant_calls
        self._num_calls = 0
        self._lanes: OrderedDict[str, deque[_C]] = OrderedDict()  # the next one to take from is the first
        self._by_length: dict[int, dict[str, None]] = {}  # tenants by the number of their calls
        self._longest = 0

    def __len__(self) -> int:
        return self._num_calls

    def add(self, tenant: str, call: _C) -> _C | None:
        """Let a call wait.

        Returns:
            The call that makes room for it and waits no longer; None if there was room.

        Raises:
            QueueFull: too many calls of this tenant wait, or too many in all and no other lane is longer.

        Complexity: O(1).
        """
        num_own = len(self._lanes.get(tenant, ()))
        _require_room(num_own, self._max_tenant_calls, " of this tenant")
        removed = None
        if self._num_calls >= self._max_calls:
            if num_own + 1 >= self._longest:
                _require_room(self._num_calls, self._max_calls, "")
            removed = self._remove_newest()
        self._lanes.setdefault(tenant, deque()).append(call)
        self._note_length(tenant, num_own, num_own + 1)
        return removed

    def _remove_newest(self) -> _C:
        """Remove the newest call of a longest lane, which has others as well."""
        tenant = next(reversed(self._by_length[self._longest]))
        lane = self._lanes[tenant]
        call = lane.pop()
        self._note_length(tenant, len(lane) + 1, len(lane))
        return call

    def take(self) -> tuple[str, _C] | None:
        """Take the next call and its tenant; None if no call waits. Complexity: O(1)."""
        if not self._lanes:
            return None
        tenant, lane = self._lanes.popitem(last=False)
        call = lane.popleft()
        if lane:
            self._lanes[tenant] = lane
        self._note_length(tenant, len(lane) + 1, len(lane))
        return tenant, call

    def put_back(self, tenant: str, call: _C) -> None:
        """Let a call that was taken go on later, before the others of its tenant. Complexity: O(1)."""
        lane = self._lanes.setdefault(tenant, deque())
        lane.appendleft(call)
        self._note_length(tenant, len(lane) - 1, len(lane))

    def _note_length(self, tenant: str, before: int, after: int) -> None:
        """Note that a lane has one call more, or one less."""
        self._num_calls += after - before
        if before:
            same = self._by_length[before]
            del same[tenant]
            if not same:
                del self._by_length[before]
        if after:
            self._by_length.setdefault(after, {})[tenant] = None
        if after > self._longest or self._longest not in self._by_length:
            self._longest = after


def _require_room(num_calls: int, max_calls: int, whose: str) -> None:
    if num_calls >= max_calls:
        raise QueueFull(
            f"engine: expected fewer than {max_calls} waiting calls{whose}, got {num_calls}", retry_after_s=RETRY_S
        )
