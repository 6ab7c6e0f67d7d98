"""The load of replicas: the tokens of the unfinished and of the recent requests that a router sent to them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

_HALF_LIFE_S = 600.0
_LOST_AFTER_S = 600.0
_MIN_DECAY_S = 1e-3


class _SentRequest(NamedTuple):
    """An unfinished request: the number of tokens to compute, the time at which it was sent, and its tenant."""

    num_tokens: int
    sent_s: float
    tenant: str


class _ReplicaLoad:
    """The load of one replica."""

    __slots__ = ("recent_tokens", "sent", "sent_tokens", "tenant_tokens")

    def __init__(self, recent_tokens: float) -> None:
        self.sent: dict[int, _SentRequest] = {}  # unfinished requests, oldest first
        self.sent_tokens = 0
        self.tenant_tokens: dict[str, int] = {}  # of `sent_tokens`, by tenant
        self.recent_tokens = recent_tokens  # decayed up to `FleetLoad._decayed_s`

    def add(self, ticket: int, sent: _SentRequest) -> None:
        """Add a request."""
        self.sent[ticket] = sent
        self.sent_tokens += sent.num_tokens
        self.tenant_tokens[sent.tenant] = self.tenant_tokens.get(sent.tenant, 0) + sent.num_tokens

    def pop(self, ticket: int) -> _SentRequest | None:
        """Remove and return a request; None if it is unknown."""
        sent = self.sent.pop(ticket, None)
        if sent is not None:
            self.sent_tokens -= sent.num_tokens
            left_tokens = self.tenant_tokens[sent.tenant] - sent.num_tokens
            if left_tokens:
                self.tenant_tokens[sent.tenant] = left_tokens
            else:
                del self.tenant_tokens[sent.tenant]
        return sent


class FleetLoad:
    """Counts the tokens of unfinished and of recent requests per replica.

    A router that counts its own requests does not send all of them to a replica that was idle when last observed.

    Args:
        half_life_s: half-life of recent tokens in seconds.
        lost_s: seconds after which a request is dropped if its end has not been reported.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        half_life_s: float = _HALF_LIFE_S,
        lost_s: float = _LOST_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decay_per_s = math.log(2) / half_life_s
        self._lost_after_s = lost_s
        self._clock = clock
        self._decayed_s = clock()
        self._loads: dict[str, _ReplicaLoad] = {}
        self._oldest_s = self._decayed_s  # no unfinished request was sent before this time
        self._tickets = itertools.count(1)

    def join(self, name: str) -> None:
        """Add a replica. Its recent tokens start at the mean of the others, so that it does not get all requests."""
        self._loads.pop(name, None)
        self._decay_recent_tokens()
        recent = [load.recent_tokens for load in self._loads.values()]
        self._loads[name] = _ReplicaLoad(sum(recent) / len(recent) if recent else 0.0)

    def leave(self, name: str) -> None:
        """Remove a replica, if it is known."""
        self._loads.pop(name, None)

    def sent(self, name: str, num_tokens: int, tenant: str = "") -> int:
        """Record a request that was sent to a replica.

        Returns:
            A ticket for `finished`.

        Complexity: O(replicas).
        """
        self._decay_recent_tokens()
        load = self._loads[name]
        load.recent_tokens += num_tokens
        ticket = next(self._tickets)
        load.add(ticket, _SentRequest(num_tokens, self._clock(), tenant))
        return ticket

    def finished(self, name: str, ticket: int, computed_tokens: int | None = None) -> bool:
        """Record the end of a request. An unknown ticket or replica is ignored.

        Args:
            name: name of the replica.
            ticket: the ticket that `sent` returned.
            computed_tokens: number of tokens that were computed; None if unknown.

        Returns:
            Whether the request was in flight.
        """
        load = self._loads.get(name)
        sent = load.pop(ticket) if load is not None else None
        if load is None or sent is None:
            return False
        if computed_tokens is not None:
            self._decay_recent_tokens()
            weight = math.exp(-self._decay_per_s * (self._decayed_s - sent.sent_s))
            load.recent_tokens = max(0.0, load.recent_tokens + weight * (computed_tokens - sent.num_tokens))
        return True

    def waits(self, names: Iterable[str], tenant: str, tokens: Iterable[int]) -> list[tuple[int, float]]:
        """Return the tokens that replicas compute before a request, and their recent tokens.

        A replica serves its tenants in turn: until it has computed the request and the earlier ones of this tenant, it
        computes at most as many tokens for each other tenant. A replica that one tenant floods is therefore not
        overloaded for the others, and still gets their requests.

        Args:
            names: names of the replicas.
            tenant: tenant of the request.
            tokens: for each replica, the number of tokens of the request that it would compute.

        Returns:
            For each replica, the number of tokens that it computes before the request, and its recent tokens with
            exponentially decaying weights.

        Complexity: O(replicas + tenants with requests there).
        """
        self._decay_recent_tokens()
        self._forget_lost()
        loads = self._loads
        waits: list[tuple[int, float]] = []
        for name, num_tokens in zip(names, tokens, strict=True):
            load = loads[name]
            sent_tokens = load.sent_tokens
            tenant_tokens = load.tenant_tokens
            if not tenant_tokens or (len(tenant_tokens) == 1 and tenant in tenant_tokens):
                waits.append((sent_tokens, load.recent_tokens))  # no other tenant waits there
                continue
            own_tokens = tenant_tokens.get(tenant, 0) + num_tokens
            # A comparison instead of `min`, which takes longer.
            other_tokens = sum(
                [
                    each if each < own_tokens else own_tokens
                    for other_tenant, each in tenant_tokens.items()
                    if other_tenant != tenant
                ]
            )
            wait_tokens = own_tokens - num_tokens + other_tokens
            waits.append((wait_tokens if wait_tokens < sent_tokens else sent_tokens, load.recent_tokens))
        return waits

    def _forget_lost(self) -> None:
        now_s = self._clock()
        lost_before_s = now_s - self._lost_after_s
        if self._oldest_s > lost_before_s:
            return
        self._oldest_s = now_s
        for load in self._loads.values():
            while load.sent:
                ticket, sent = next(iter(load.sent.items()))
                if sent.sent_s > lost_before_s:
                    self._oldest_s = min(self._oldest_s, sent.sent_s)
                    break
                load.pop(ticket)

    def _decay_recent_tokens(self) -> None:
        """Reduce the recent tokens of all replicas to their weights at the present time."""
        now_s = self._clock()
        if now_s - self._decayed_s < _MIN_DECAY_S:
            return
        factor = math.exp(-self._decay_per_s * (now_s - self._decayed_s))
        self._decayed_s = now_s
        for load in self._loads.values():
            load.recent_tokens *= factor
