"""The ingress of a fleet: its gRPC server in a process of Ray."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from radixkv.config import FleetConfig, ServerConfig
from radixkv.errors import NoReplica
from radixkv.service.cluster.forwarder import Forwarder
from radixkv.service.cluster.ingress_server import IngressServer
from radixkv.service.cluster.question import Question, Routed

_ONE_TOKEN = bytes(4)

_log = logging.getLogger(__name__)


class Ingress:
    """The gRPC server that callers of a fleet reach, and the router of its replicas. Ray watches its life.

        caller ── gRPC ─▶ Ingress ── gRPC ─▶ Replica
                             └─ handle.choose_replica ─▶ PrefixRouter, in this process

    Args:
        server: where to listen, and who may call.
        fleet: how to route.
        replicas: Ray's handle of the replicas.
    """

    async def __init__(self, server: ServerConfig, fleet: FleetConfig, replicas: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        self._replicas = replicas
        self._wait_s = fleet.start_timeout_s
        first = await self._first()
        first.finish(0, 0.0)
        self._server = IngressServer(server, first.line.facts, Forwarder(self.choose, fleet.start_timeout_s))
        self._address = await self._server.start()
        _log.info("ingress listens on %s", self._address)

    async def choose(self, question: Question) -> Routed:
        """Have Ray's router choose a replica. No request is sent through Ray.

        Raises:
            NoReplica: none is there, or none that the question does not avoid.
        """
        question.answer = None
        try:
            async with (
                asyncio.timeout(self._wait_s),
                # Ray need not reserve a place: replicas have queues of their own, and tell how many wait.
                self._replicas.choose_replica(question, _reserve=False),
            ):
                pass
        except TimeoutError as error:
            raise NoReplica(f"replicas: expected one within {self._wait_s:g} s, got none") from error
        if question.answer is None:
            raise NoReplica("replicas: expected one, got none")
        return question.answer

    async def check_health(self) -> None:
        """Raise if the process should be replaced. Ray asks every few seconds."""
        if self._server.has_ended:
            raise RuntimeError("ingress: expected it to serve, got one that has ended")

    async def __del__(self) -> None:
        """Let running calls finish, then stop."""
        if hasattr(self, "_address"):
            await self._server.drain()

    async def _first(self) -> Routed:
        """Wait for the first replica, however long its model takes to load."""
        while True:
            try:
                return await self.choose(Question(_ONE_TOKEN))
            except NoReplica:
                await asyncio.sleep(0)
