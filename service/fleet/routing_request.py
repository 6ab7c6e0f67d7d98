"""A request to route a prompt within a fleet, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from radixkv.routing.router import Route
from radixkv.service.fleet.replica_connection import ReplicaConnection
from radixkv.v1 import fleet_pb2


class RoutingReason(Enum):
    """Why a replica was chosen; the values are those of the .proto file."""

    LOAD = fleet_pb2.ROUTED_BY_LOAD
    PREFIX = fleet_pb2.ROUTED_BY_PREFIX
    AWAY = fleet_pb2.ROUTED_AWAY
    NEW_HOME = fleet_pb2.ROUTED_TO_NEW_HOME


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The replica that was chosen for a request.

    Attributes:
        connection: the connection to it.
        route: the decision of the router.
        reason: why it was chosen.
        seconds: expected time until the prompt is computed.
        num_replicas: number of candidates.
        finish: must be called when the prompt was computed, with the number of computed tokens, or has failed, with
            None.
    """

    connection: ReplicaConnection
    route: Route
    reason: RoutingReason
    seconds: float
    num_replicas: int
    finish: Callable[[int | None], None]

    @property
    def name(self) -> str:
        """Address of the replica."""
        return self.route.name


@dataclass(slots=True)
class RoutingRequest:
    """A prompt that is to be routed. It passes through Ray's router within one process, which stores the result in it.

    Attributes:
        tokens: the prompt, little-endian uint32 bytes.
        tenant, adapter, salt: of the request.
        avoid: addresses of replicas that must not be chosen.
        source: address of the replica that its K/V are fetched from, which is chosen only if there is no other; empty
            for none.
        routed: the result, set by the router.
    """

    tokens: bytes = field(repr=False)
    tenant: str = ""
    adapter: str = ""
    salt: str = ""
    avoid: set[str] = field(default_factory=set)
    source: str = ""
    routed: RoutedRequest | None = None


@dataclass(slots=True)
class ReplicaListing:
    """A request for the connections to all replicas, which passes through Ray's router like a `RoutingRequest`.

    Attributes:
        connections: the result, set by the router.
    """

    connections: tuple[ReplicaConnection, ...] = ()
