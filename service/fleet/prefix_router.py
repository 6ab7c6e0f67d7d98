"""The request router that chooses replicas in Ray Serve, by default by their caches."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from radixkv.routing.policies import RoutingWeights
from radixkv.service.fleet.fleet_state import FleetState
from radixkv.service.fleet.replica_connection import HealthCheckTimes, ReplicaConnection
from radixkv.service.fleet.replica_facts import ReplicaFacts
from radixkv.service.fleet.routing_request import ReplicaListing, RoutingRequest


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped here
    """Chooses a replica for each request by the policy `fleet.routing`, by default from the caches of the replicas.

    Ray reports which replicas there are; everything else comes from the replicas over gRPC, see `FleetState`. If the
    first argument of a call is a `RoutingRequest` or a `ReplicaListing`, the result is stored in that argument. Any
    other call may go to any replica.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Read the values of the section `fleet`, which Ray passes as JSON."""
        health_checks = HealthCheckTimes(timeout_s=kwargs["health_timeout_s"])
        self._fleet_state = FleetState(
            lambda facts: ReplicaConnection(facts, health_checks, tls_ca=kwargs["tls_ca"], tls_name=kwargs["tls_name"]),
            routing=kwargs["routing"],
            weights=RoutingWeights(least_match_tokens=kwargs["least_match_tokens"]),
        )
        self._by_address: dict[str, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Add and remove replicas."""
        with_facts = [
            (ReplicaFacts.from_metadata(each.replica_metadata), each) for each in replicas if each.replica_metadata
        ]
        self._by_address = {facts.address: each for facts, each in with_facts}
        self._fleet_state.update(facts for facts, _ in with_facts)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose one replica.

        Raises:
            NoReplica: the request avoids all replicas.
            InvalidRequest: its prompt is empty.
            UnknownLease: its source is not in the fleet.
        """
        argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(argument, ReplicaListing):
            argument.connections = self._fleet_state.connections
        if not isinstance(argument, RoutingRequest):
            return [candidate_replicas]
        routed = self._fleet_state.route(argument)
        argument.routed = routed
        return [[self._by_address[routed.name]]]
