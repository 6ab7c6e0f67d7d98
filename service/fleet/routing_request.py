"""A request to route a prompt within a fleet, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from radixkv.routing.router import Route
from radixkv.service.fleet.replica_connection import ReplicaConnection
from radixkv.v1 import fleet_pb2

ANY_PROMPT = bytes(4)
"""A prompt of one token, to be routed to any replica."""


class RoutingReason(Enum):
    """Why a replica was chosen; see `RouteReason` in fleet.proto."""

    LOAD = fleet_pb2.ROUTED_BY_LOAD  # it has the lowest load; no replica has a useful prefix
    PREFIX = fleet_pb2.ROUTED_BY_PREFIX  # it has the longest useful prefix
    AWAY = fleet_pb2.ROUTED_AWAY  # the replica with the longest prefix is too busy
    NEW_HOME = fleet_pb2.ROUTED_TO_NEW_HOME  # the prefix is in high demand, so one more replica computes it


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The replica that was chosen for a request.

    Attributes:
        connection: the connection to the replica.
        route: the decision of the router.
        reason: why the replica was chosen.
        expected_s: expected seconds until the prompt is computed.
        num_replicas: number of candidates.
        finish: must be called at the end of the request: with the number of computed tokens, or with None if it failed
            or the number is unknown. Further calls do nothing.
    """

    connection: ReplicaConnection
    route: Route
    reason: RoutingReason
    expected_s: float
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
        tenant, adapter, salt: the namespace of the request.
        avoid: addresses of replicas that must not be chosen.
        source: address of the replica from which the K/V of the prompt are fetched. That replica is chosen only if
            there is no other. Empty for none.
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
