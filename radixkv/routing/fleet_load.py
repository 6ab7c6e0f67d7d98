"""Tokens that replicas have to compute, as far as a router knows: those it sent, and those that replicas tell of."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

_HALF_LIFE_S = 600.0
_LOST_S = 600.0
_LEAST_AGE_S = 1e-3


class _Sent(NamedTuple):
    """A request that is not finished: the tokens to compute for it, when it was sent, and whose it is."""

    num_tokens: int
    then_s: float
    tenant: str


class _Load:
    """The load of one replica."""

    __slots__ = ("recent_tokens", "reported_tokens", "sent", "sent_tokens", "tenant_tokens")

    def __init__(self, recent_tokens: float) -> None:
        self.sent: dict[int, _Sent] = {}  # requests that are not finished, oldest first
        self.sent_tokens = 0
        self.tenant_tokens: dict[str, int] = {}  # the same, by tenant
        self.recent_tokens = recent_tokens  # at the time of `FleetLoad._then_s`
        self.reported_tokens = 0

    def add(self, ticket: int, sent: _Sent) -> None:
        """Note a request that is sent."""
        self.sent[ticket] = sent
        self.sent_tokens += sent.num_tokens
        self.tenant_tokens[sent.tenant] = self.tenant_tokens.get(sent.tenant, 0) + sent.num_tokens

    def pop(self, ticket: int) -> _Sent | None:
        """Return a request and forget it; None if it is not known."""
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
    """Counts the tokens that replicas have yet to compute, and those that they computed of late.

    A router that counts what it sends does not send all it has to the replica that looked idle in the last report.

    Args:
        half_life_s: seconds after which tokens count half.
        lost_s: seconds after which a request whose end was never told is forgotten.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        *,
        half_life_s: float = _HALF_LIFE_S,
        lost_s: float = _LOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decay = math.log(2) / half_life_s
        self._lost_s = lost_s
        self._clock = clock
        self._then_s = clock()
        self._loads: dict[str, _Load] = {}
        self._oldest_s = self._then_s  # no request that is not finished was sent before
        self._tickets = itertools.count(1)

    def join(self, name: str) -> None:
        """Add a replica. It counts as if it had computed as much as the others, or all would go there at first."""
        self._loads.pop(name, None)
        self._age()
        recent = [load.recent_tokens for load in self._loads.values()]
        self._loads[name] = _Load(sum(recent) / len(recent) if recent else 0.0)

    def leave(self, name: str) -> None:
        """Forget a replica; one that is unknown stays so."""
        self._loads.pop(name, None)

    def sent(self, name: str, num_tokens: int, tenant: str = "") -> int:
        """Note that a replica has tokens to compute, for a tenant.

        Returns:
            A ticket to tell the end with.

        Complexity: O(replicas).
        """
        self._age()
        load = self._loads[name]
        load.recent_tokens += num_tokens
        ticket = next(self._tickets)
        load.add(ticket, _Sent(num_tokens, self._clock(), tenant))
        return ticket

    def finished(self, name: str, ticket: int, computed_tokens: int | None = None) -> bool:
        """Note the end of a request. An unknown ticket or replica changes nothing.

        Args:
            name: of the replica.
            ticket: of `sent`.
            computed_tokens: what it did compute; None if that is as expected.

        Returns:
            Whether it was under way.
        """
        load = self._loads.get(name)
        sent = load.pop(ticket) if load is not None else None
        if load is None or sent is None:
            return False
        if computed_tokens is not None:
            self._age()
            aged = math.exp(-self._decay * (self._then_s - sent.then_s))
            load.recent_tokens = max(0.0, load.recent_tokens + aged * (computed_tokens - sent.num_tokens))
        return True

    def reported(self, name: str, queue_tokens: int) -> None:
        """Note what a replica says that it has yet to compute, also for other routers. No live server says so far."""
        self._loads[name].reported_tokens = queue_tokens

    def queue_tokens(self, name: str) -> int:
        """Return the tokens that a replica has yet to compute: what it tells, or what it was sent if that is more."""
        self._forget_lost()
        load = self._loads[name]
        return max(load.reported_tokens, load.sent_tokens)

    def waits(self, names: Iterable[str], tenant: str, tokens: Iterable[int]) -> list[tuple[int, float]]:
        """Return what replicas compute before they end a request, besides the request's own, and did of late.

        A replica serves tenants in turn: while it computes what this one has there and the request, it computes at most
        as much for each other. So the queue of a tenant that floods a replica drives nobody else away from it.

        Args:
            names: of the replicas.
            tenant: whose request it is.
            tokens: that the request makes each of them compute.

        Returns:
            For each replica the tokens that wait before the request, and those that it got to compute of late, older
            ones counting less.

        Complexity: O(replicas and tenants whose requests wait there).
        """
        self._age()
        self._forget_lost()
        loads, waits = self._loads, []
        for name, num_tokens in zip(names, tokens, strict=True):
            load = loads[name]
            sent_tokens, reported_tokens = load.sent_tokens, load.reported_tokens
            total = reported_tokens if reported_tokens > sent_tokens else sent_tokens
            waiting = load.tenant_tokens
            if not waiting or (len(waiting) == 1 and tenant in waiting):
                waits.append((total, load.recent_tokens))  # nobody else to share with
                continue
            turn = waiting.get(tenant, 0) + num_tokens
            others = sum([each if each < turn else turn for other, each in waiting.items() if other != tenant])
            wait_tokens = turn - num_tokens + others + total - sent_tokens
            waits.append((wait_tokens if wait_tokens < total else total, load.recent_tokens))
        return waits

    def recent_tokens(self, name: str) -> float:
        """Return the tokens that a replica got to compute, older ones counting less."""
        self._age()
        return self._loads[name].recent_tokens

    def _forget_lost(self) -> None:
        lost_s = self._clock() - self._lost_s
        if self._oldest_s > lost_s:
            return
        self._oldest_s = lost_s + self._lost_s
        for load in self._loads.values():
            while load.sent:
                ticket, sent = next(iter(load.sent.items()))
                if sent.then_s > lost_s:
                    self._oldest_s = min(self._oldest_s, sent.then_s)
                    break
                load.pop(ticket)

    def _age(self) -> None:
        now_s = self._clock()
        if now_s - self._then_s < _LEAST_AGE_S:
            return
        kept = math.exp(-self._decay * (now_s - self._then_s))
        self._then_s = now_s
        for load in self._loads.values():
            load.recent_tokens *= kept
