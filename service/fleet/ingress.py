"""The ingress of a fleet: its gRPC server in a process of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from radixkv.config import FleetConfig, ServerConfig
from radixkv.errors import NoReplica
from radixkv.service.fleet.disaggregated_prefill import DisaggregatedPrefill
from radixkv.service.fleet.forwarder import Choose, Forwarder
from radixkv.service.fleet.ingress_server import IngressServer
from radixkv.service.fleet.replica_connection import ReplicaConnection
from radixkv.service.fleet.routing_request import ReplicaListing, RoutedRequest, RoutingRequest

_ONE_TOKEN = bytes(4)
_LISTING_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


class Ingress:
    """The gRPC server that clients of a fleet call, and the router of its replicas, supervised by Ray.

        caller ── gRPC ─▶ Ingress ── gRPC ─▶ Replica
                             └─ handle.choose_replica ─▶ PrefixRouter, in this process

    Args:
        server: configuration of the server.
        fleet: configuration of routing.
        replicas: Ray handle of the replicas, or of the prefill replicas if they have roles.
        generating: Ray handle of the decode replicas; None if replicas have no roles.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, server: ServerConfig, fleet: FleetConfig, replicas: Any, generating: Any = None
    ) -> None:
        self._replicas = replicas
        self._all = (replicas,) if generating is None else (replicas, generating)
        self._wait_s = fleet.start_timeout_s
        first = await self._first(self.choose)
        first.finish(0)
        forwarder, disaggregated = Forwarder(self.choose, self._wait_s), None
        if generating is not None:
            choose = partial(_choice, generating, self._wait_s)
            (await self._first(choose)).finish(0)
            # Decode replicas can prefill, too, so do not wait long for prefill replicas.
            patience_s = min(self._wait_s, fleet.health_timeout_s)
            computing = Forwarder(partial(_choice, replicas, patience_s), patience_s)
            disaggregated = DisaggregatedPrefill(computing, Forwarder(choose, self._wait_s))
        self._server = IngressServer(server, first.connection.facts, forwarder, self.connections, disaggregated)
        self._address = await self._server.start()
        _log.info("ingress listens on %s", self._address)

    async def choose(self, question: RoutingRequest) -> RoutedRequest:
        """Choose a replica, or a prefill replica if they have roles, by Ray's router.

        Raises:
            NoReplica: there is none, or none that the request does not avoid.
        """
        return await _choice(self._replicas, self._wait_s, question)

    async def connections(self) -> list[ReplicaConnection]:
        """Return the connections to all replicas, of all roles."""
        found: list[ReplicaConnection] = []
        for handle in self._all:
            listing = ReplicaListing()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LISTING_TIMEOUT_S), handle.choose_replica(listing, _reserve=False):
                    found += listing.connections
        return found

    async def check_health(self) -> None:
        """Raise an error if the process should be replaced. Ray calls this every few seconds."""
        if self._server.has_ended:
            raise RuntimeError("ingress: expected it to serve, got one that has ended")

    async def __del__(self) -> None:
        """Let running calls finish, then stop."""
        if hasattr(self, "_address"):
            await self._server.drain()

    async def _first(self, choose: Choose) -> RoutedRequest:
        """Wait for the first replica, without a timeout, since large models load slowly."""
        while True:
            try:
                return await choose(RoutingRequest(_ONE_TOKEN))
            except NoReplica:
                await asyncio.sleep(0)


async def _choice(replicas: Any, wait_s: float, question: RoutingRequest) -> RoutedRequest:
    """Choose one of the replicas of a handle by Ray's router. No request is sent through Ray."""
    question.answer = None
    try:
        async with (
            asyncio.timeout(wait_s),
            # Ray need not reserve a slot: replicas have their own queues, and report how many requests wait.
            replicas.choose_replica(question, _reserve=False),
        ):
            pass
    except TimeoutError as error:
        raise NoReplica(f"replicas: expected one within {wait_s:g} s, got none") from error
    if question.answer is None:
        raise NoReplica("replicas: expected one, got none")
    return question.answer
