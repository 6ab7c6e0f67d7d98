"""A request that a fleet's router is asked about, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from radixkv.routing.router import Route
from radixkv.service.fleet.replica_connection import ReplicaConnection
from radixkv.v1 import fleet_pb2


class Reason(Enum):
    """Why a replica gets a request; the numbers of the wire."""

    LOAD = fleet_pb2.ROUTED_BY_LOAD
    PREFIX = fleet_pb2.ROUTED_BY_PREFIX
    AWAY = fleet_pb2.ROUTED_AWAY
    NEW_HOME = fleet_pb2.ROUTED_TO_NEW_HOME


@dataclass(frozen=True, slots=True)
class Routed:
    """The replica that gets a request.

    Attributes:
        connection: the connection to it.
        route: what the router knew.
        reason: why it was this one.
        seconds: that the request should take there.
        num_replicas: that could have got it.
        finish: to be called once the prompt is computed, or will not be: with the computed tokens, or None.
    """

    connection: ReplicaConnection
    route: Route
    reason: Reason
    seconds: float
    num_replicas: int
    finish: Callable[[int | None], None]

    @property
    def name(self) -> str:
        """Address of the replica."""
        return self.route.name


@dataclass(slots=True)
class Question:
    """A prompt that is to be routed. It goes through Ray's router within one process, and carries the answer back.

    Attributes:
        tokens: the prompt, little-endian uint32 bytes.
        tenant, adapter, salt: of the request.
        avoid: addresses of replicas that must not get it.
        source: address of the replica that has its K/V to fetch, which gets it only if there is no other; empty for
            none.
        answer: set by the router.
    """

    tokens: bytes = field(repr=False)
    tenant: str = ""
    adapter: str = ""
    salt: str = ""
    avoid: set[str] = field(default_factory=set)
    source: str = ""
    answer: Routed | None = None


@dataclass(slots=True)
class Census:
    """The question which replicas there are, which goes the way of a `Question`.

    Attributes:
        connections: to all of them, set by the router.
    """

    connections: tuple[ReplicaConnection, ...] = ()
