"""The ingress of a fleet: its gRPC server in a process of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from radixkv.config import FleetConfig, ServerConfig
from radixkv.errors import NoReplica
from radixkv.service.fleet.disaggregated_prefill import HandOver
from radixkv.service.fleet.forwarder import Choose, Forwarder
from radixkv.service.fleet.ingress_server import IngressServer
from radixkv.service.fleet.replica_connection import ReplicaConnection
from radixkv.service.fleet.routing_request import Census, Question, Routed

_ONE_TOKEN = bytes(4)
_CENSUS_S = 1.0

_log = logging.getLogger(__name__)


class Ingress:
    """The gRPC server that callers of a fleet reach, and the router of its replicas. Ray watches its life.

        caller ── gRPC ─▶ Ingress ── gRPC ─▶ Replica
                             └─ handle.choose_replica ─▶ PrefixRouter, in this process

    Args:
        server: where to listen, and who may call.
        fleet: how to route.
        replicas: Ray's handle of the replicas; of those that compute prompts, where they have roles.
        generating: Ray's handle of those that generate; None where all do both.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, server: ServerConfig, fleet: FleetConfig, replicas: Any, generating: Any = None
    ) -> None:
        self._replicas = replicas
        self._all = (replicas,) if generating is None else (replicas, generating)
        self._wait_s = fleet.start_timeout_s
        first = await self._first(self.choose)
        first.finish(0)
        forwarder, hand_over = Forwarder(self.choose, self._wait_s), None
        if generating is not None:
            choose = partial(_choice, generating, self._wait_s)
            (await self._first(choose)).finish(0)
            # Who generates can compute as well: a generation waits for nobody else for long.
            patience_s = min(self._wait_s, fleet.health_timeout_s)
            computing = Forwarder(partial(_choice, replicas, patience_s), patience_s)
            hand_over = HandOver(computing, Forwarder(choose, self._wait_s))
        self._server = IngressServer(server, first.connection.facts, forwarder, self.connections, hand_over)
        self._address = await self._server.start()
        _log.info("ingress listens on %s", self._address)

    async def choose(self, question: Question) -> Routed:
        """Have Ray's router choose a replica, of those that compute prompts.

        Raises:
            NoReplica: none is there, or none that the question does not avoid.
        """
        return await _choice(self._replicas, self._wait_s, question)

    async def connections(self) -> list[ReplicaConnection]:
        """Return the connections to all replicas. Of those with a role of which none is there, there are none."""
        found: list[ReplicaConnection] = []
        for handle in self._all:
            census = Census()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CENSUS_S), handle.choose_replica(census, _reserve=False):
                    found += census.connections
        return found

    async def check_health(self) -> None:
        """Raise if the process should be replaced. Ray asks every few seconds."""
        if self._server.has_ended:
            raise RuntimeError("ingress: expected it to serve, got one that has ended")

    async def __del__(self) -> None:
        """Let running calls finish, then stop."""
        if hasattr(self, "_address"):
            await self._server.drain()

    async def _first(self, choose: Choose) -> Routed:
        """Wait for the first replica, however long its model takes to load."""
        while True:
            try:
                return await choose(Question(_ONE_TOKEN))
            except NoReplica:
                await asyncio.sleep(0)


async def _choice(replicas: Any, wait_s: float, question: Question) -> Routed:
    """Have Ray's router choose one of the replicas of a handle. No request is sent through Ray."""
    question.answer = None
    try:
        async with (
            asyncio.timeout(wait_s),
            # Ray need not reserve a place: replicas have queues of their own, and tell how many wait.
            replicas.choose_replica(question, _reserve=False),
        ):
            pass
    except TimeoutError as error:
        raise NoReplica(f"replicas: expected one within {wait_s:g} s, got none") from error
    if question.answer is None:
        raise NoReplica("replicas: expected one, got none")
    return question.answer
