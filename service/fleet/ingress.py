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
from radixkv.service.fleet.routing_request import ANY_PROMPT, ReplicaListing, RoutedRequest, RoutingRequest

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
        decode_replicas: Ray handle of the decode replicas; None if replicas have no roles.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, server: ServerConfig, fleet: FleetConfig, replicas: Any, decode_replicas: Any = None
    ) -> None:
        self._replicas = replicas
        self._handles = (replicas,) if decode_replicas is None else (replicas, decode_replicas)
        self._wait_s = fleet.start_timeout_s
        first_routed = await self._wait_for_first(self.choose)
        first_routed.finish(0)
        forwarder, disaggregated = Forwarder(self.choose, self._wait_s), None
        if decode_replicas is not None:
            choose = partial(_choose_replica, decode_replicas, self._wait_s)
            (await self._wait_for_first(choose)).finish(0)
            # Decode replicas can also prefill, so calls do not wait long for prefill replicas.
            max_wait_s = min(self._wait_s, fleet.health_timeout_s)
            prefill_forwarder = Forwarder(partial(_choose_replica, replicas, max_wait_s), max_wait_s)
            disaggregated = DisaggregatedPrefill(prefill_forwarder, Forwarder(choose, self._wait_s))
        self._server = IngressServer(server, first_routed.connection.facts, forwarder, self.connections, disaggregated)
        self._address = await self._server.start()
        _log.info("ingress listens on %s", self._address)

    async def choose(self, prompt: RoutingRequest) -> RoutedRequest:
        """Choose a replica with Ray's router; if replicas have roles, a prefill replica.

        Raises:
            NoReplica: there is no replica, or the request avoids all of them.
        """
        return await _choose_replica(self._replicas, self._wait_s, prompt)

    async def connections(self) -> list[ReplicaConnection]:
        """Return the connections to all replicas, of all roles."""
        connections: list[ReplicaConnection] = []
        for handle in self._handles:
            listing = ReplicaListing()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LISTING_TIMEOUT_S), handle.choose_replica(listing, _reserve=False):
                    connections += listing.connections
        return connections

    async def check_health(self) -> None:
        """Raise an error if the process should be replaced. Ray calls this every few seconds."""
        if self._server.has_ended:
            raise RuntimeError("ingress: gRPC has stopped serving")

    async def __del__(self) -> None:
        """Let running calls finish, then stop."""
        if hasattr(self, "_address"):
            await self._server.drain()

    async def _wait_for_first(self, choose: Choose) -> RoutedRequest:
        """Wait for the first replica, without a timeout, since large models load slowly."""
        while True:
            try:
                return await choose(RoutingRequest(ANY_PROMPT))
            except NoReplica:
                await asyncio.sleep(0)


async def _choose_replica(replicas: Any, wait_s: float, prompt: RoutingRequest) -> RoutedRequest:
    """Choose one of the replicas of a handle with Ray's router. No request is sent through Ray."""
    prompt.routed = None
    try:
        async with (
            asyncio.timeout(wait_s),
            # Ray need not reserve a slot: replicas have their own queues, and report how many requests wait.
            replicas.choose_replica(prompt, _reserve=False),
        ):
            pass
    except TimeoutError as error:
        raise NoReplica(f"replicas: none was available within {wait_s:g} s") from error
    if prompt.routed is None:
        raise NoReplica("replicas: none is available")
    return prompt.routed
