"""The state of a fleet's router: the connections to the replicas, and a view of their caches and load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from radixkv.errors import NoReplica, UnknownLease
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.policies import PREFIX, RoutingWeights, make_routing
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.router import Route, Router
from radixkv.service.fleet.event_subscription import EventSubscription
from radixkv.service.fleet.replica_connection import ReplicaConnection
from radixkv.service.fleet.replica_facts import ReplicaFacts
from radixkv.service.fleet.replica_speeds import ReplicaSpeeds
from radixkv.service.fleet.routing_request import RoutedRequest, RoutingReason, RoutingRequest
from radixkv.tokens import TOKEN_BYTES

_log = logging.getLogger(__name__)


class FleetState:
    """Tracks the replicas of a fleet, and chooses one for each request.

        Ray: replicas ──────▶ update ─▶ a connection each ─┬─ events ─▶ view ─┐
                                                          └─ health          ├─▶ route ─▶ policy of radixkv.routing
        responses ─▶ finish ─▶ queues, measured times ───────────────────────┘

    For use on one event loop.

    Args:
        connect: opens the connection to a replica.
        routing: name of the routing policy.
        weights: weights of the policy `prefix`.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        connect: Callable[[ReplicaFacts], ReplicaConnection] = ReplicaConnection,
        *,
        routing: str = PREFIX,
        weights: RoutingWeights = RoutingWeights(),  # noqa: B008 - it is frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._policy = make_routing(routing, weights)
        self._weights = weights
        self._clock = clock
        self._connections: dict[str, ReplicaConnection] = {}
        self._tasks: dict[str, tuple[asyncio.Task[None], asyncio.Task[None]]] = {}
        self._close_tasks: set[asyncio.Task[None]] = set()
        self._speeds = ReplicaSpeeds(clock)
        self._router: Router | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the replicas."""
        return tuple(self._connections)

    @property
    def connections(self) -> tuple[ReplicaConnection, ...]:
        """Connections to the replicas."""
        return tuple(self._connections.values())

    def update(self, replicas: Iterable[ReplicaFacts]) -> None:
        """Add and remove replicas, so that the fleet consists of exactly `replicas`."""
        current = {facts.address: facts for facts in replicas}
        for name, connection in list(self._connections.items()):
            if current.get(name) != connection.facts:
                self._leave(name)
        for name, facts in current.items():
            if name not in self._connections:
                self._join(facts)

    def route(self, prompt: RoutingRequest) -> RoutedRequest:
        """Choose the replica of a request. From then on, the router expects the prompt in the cache of this replica.

        A replica that accepted no requests at its last health check is chosen only if there is no other. The same
        applies to `prompt.source`, the replica from which the K/V are fetched.

        Raises:
            InvalidRequest: the prompt is empty.
            NoReplica: no replica is left.
            UnknownLease: `prompt.source` is not in the fleet.
        """
        if prompt.source and prompt.source not in self._connections:
            raise UnknownLease("kv_source.address: it is not the address of a replica, or that replica has ended")
        allowed = self._connections.keys() - prompt.avoid
        if self._router is None or not allowed:
            raise NoReplica("replicas: there is none that may get the request")

        # Avoid replicas that are not up, and the source, unless there is no other.
        not_up = {name for name, connection in self._connections.items() if not connection.is_up}
        avoid = prompt.avoid | not_up if allowed - not_up else prompt.avoid
        if prompt.source and self._connections.keys() - avoid - {prompt.source}:
            avoid = avoid | {prompt.source}

        namespace = Namespace(self._fingerprint(), prompt.tenant, prompt.adapter, prompt.salt)
        route = self._router.route(namespace, prompt.tokens, avoid)
        asyncio.get_running_loop().call_soon(self._router.remember)  # later, so that it does not delay the request
        num_replicas = len(self._connections.keys() - avoid)
        num_tokens_to_compute = len(prompt.tokens) // TOKEN_BYTES - route.hits.total + route.queue_tokens
        return RoutedRequest(
            connection=self._connections[route.name],
            route=route,
            reason=self._reason(route),
            expected_s=num_tokens_to_compute * self._speeds.of(route.name).compute_s,
            num_replicas=num_replicas,
            finish=partial(self._finish, route, self._clock()),
        )

    def _fingerprint(self) -> str:
        """Return the most common model fingerprint of the replicas that are up, or of all replicas if none is up.

        Replicas differ while a new model replaces another one. If two models have equally many replicas, that of the
        replica that joined first is returned.
        """
        replicas = [each for each in self._connections.values() if each.is_up] or self._connections.values()
        return Counter(each.facts.fingerprint for each in replicas).most_common(1)[0][0]

    async def close(self) -> None:
        """Remove all replicas."""
        for name in self.addresses:
            self._leave(name)
        await asyncio.gather(*self._close_tasks, return_exceptions=True)

    def _join(self, facts: ReplicaFacts) -> None:
        if self._router is None:
            self._router = Router(
                FleetView(facts.event_block_size, clock=self._clock),
                FleetLoad(clock=self._clock),
                PrefixDemand(clock=self._clock),
                self._policy,
                identities=Identities(facts.open_tenant, facts.secrets.events_key),
                times=self._speeds.of,
            )
        name = facts.address
        connection = self._connections[name] = self._connect(facts)
        self._router.join(name)
        stream = asyncio.ensure_future(EventSubscription(name, connection, self._router.view).run())
        stream.add_done_callback(partial(_log_failure, name))
        self._tasks[name] = (stream, asyncio.ensure_future(connection.watch()))
        _log.info("replica %s: joined, %d in all", name, len(self._connections))

    def _leave(self, name: str) -> None:
        connection = self._connections.pop(name)
        if self._router is not None:
            self._router.leave(name)
        self._speeds.forget(name)
        close_task = asyncio.ensure_future(_close(connection, *self._tasks.pop(name)))
        self._close_tasks.add(close_task)
        close_task.add_done_callback(self._close_tasks.discard)
        _log.info("replica %s: left, %d in all", name, len(self._connections))

    def _finish(self, route: Route, sent_s: float, computed_tokens: int | None) -> None:
        if self._router is not None and self._router.finished(route, computed_tokens):
            self._speeds.note(route.name, sent_s, computed_tokens)

    def _reason(self, route: Route) -> RoutingReason:
        if route.is_new_home:
            return RoutingReason.NEW_HOME
        min_useful_tokens = self._weights.least_match_tokens
        if route.max_hit_tokens - route.hits.total >= min_useful_tokens:
            return RoutingReason.AWAY
        return RoutingReason.PREFIX if route.hits.total >= min_useful_tokens else RoutingReason.LOAD


def _log_failure(name: str, stream: asyncio.Task[None]) -> None:
    """Log why the events of a replica can't be read. The router still knows which prompts it sent there."""
    if not stream.cancelled() and stream.exception() is not None:
        _log.error("replica %s: its events can't be read", name, exc_info=stream.exception())


async def _close(connection: ReplicaConnection, stream: asyncio.Task[None], watch: asyncio.Task[None]) -> None:
    """Close a connection after its calls in flight, which are abandoned only if the replica fails health checks."""
    stream.cancel()
    await connection.finish()
    watch.cancel()
    await asyncio.gather(stream, watch, return_exceptions=True)
    await connection.close()
