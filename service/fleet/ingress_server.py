"""The gRPC server that clients of a fleet call."""

from __future__ import annotations

import asyncio

from radixkv.api.limits import Limits
from radixkv.config import ServerConfig
from radixkv.service.fleet.cache_service import FleetCacheService, ListReplicas
from radixkv.service.fleet.disaggregated_prefill import DisaggregatedPrefill
from radixkv.service.fleet.forwarder import Forwarder
from radixkv.service.fleet.replica_facts import ReplicaFacts
from radixkv.service.fleet.servicers import (
    FleetModelServicer,
    FleetPrefillServicer,
    FleetServicer,
    add_partial_service,
)
from radixkv.service.server.auth.server_auth import ServerAuth
from radixkv.service.server.connections import end_connections
from radixkv.service.server.guarded_server import GuardedServer
from radixkv.service.server.listen_address import bind_port, host_port
from radixkv.service.server.receive.grpc_options import grpc_server
from radixkv.service.server.receive.receiver import Receiver
from radixkv.service.server.servicers.health_status import HealthStatus
from radixkv.service.server.servicers.standard_services import add_standard_services, log_missing_services
from radixkv.v1 import (
    cache_pb2,
    events_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

_CACHE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"]
_EVENTS = events_pb2.DESCRIPTOR.services_by_name["EventService"]
_SERVICES = (
    prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    _CACHE.full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
_FLUSH_S = 1.0  # at the end of a drain, for clients to read their last responses and close their connections


class IngressServer:
    """The gRPC server of a fleet. It authenticates clients as a single server does, see `service/server/auth`.

    Create it inside the event loop that runs it.

    Args:
        config: the address, the credentials of callers, and limits on what callers hold.
        facts: properties of a replica; all serve the same model.
        forwarder: forwards calls to replicas.
        list_replicas: returns the connections to all replicas.
        disaggregated: handles `Generate` if replicas have roles (prefill or decode); None if they have none.

    Raises:
        ConfigError: a file of credentials or certificates can't be used.
    """

    def __init__(
        self,
        config: ServerConfig,
        facts: ReplicaFacts,
        forwarder: Forwarder,
        list_replicas: ListReplicas,
        disaggregated: DisaggregatedPrefill | None = None,
    ) -> None:
        self._config = config
        self._disaggregated = disaggregated
        self._auth = ServerAuth(config)
        self._health = HealthStatus()
        self._port: int | None = None
        limits = _limits(facts)
        self._receiver = Receiver(config, limits)
        self._grpc = grpc_server(config, limits)
        guarded = GuardedServer(self._grpc, self._auth.authorizer(), self._receiver)
        prefill_servicer = FleetPrefillServicer(forwarder, disaggregated)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill_servicer, guarded)  # type: ignore[no-untyped-call]
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetServicer(forwarder), guarded)  # type: ignore[no-untyped-call]
        model_pb2_grpc.add_ModelServiceServicer_to_server(FleetModelServicer(forwarder), guarded)  # type: ignore[no-untyped-call]
        add_partial_service(guarded, _CACHE, FleetCacheService(list_replicas, forwarder).methods)
        add_partial_service(guarded, _EVENTS)  # without methods: its calls are refused with a reference to replicas
        add_standard_services(guarded, self._health, _SERVICES)

    async def start(self) -> str:
        """Bind the address and serve.

        Returns:
            `HOST:PORT` with the port that was bound.

        Raises:
            ConfigError: the address can't be bound.
        """
        port = bind_port(self._grpc, self._config.host, "server.port", self._config.port, self._auth.tls)
        self._port = port
        log_missing_services()
        await self._grpc.start()
        self._termination = asyncio.ensure_future(self._grpc.wait_for_termination())
        self._health.set(_SERVICES, is_serving=True)
        return host_port(self._config.host, port)

    @property
    def has_ended(self) -> bool:
        """Whether gRPC stopped serving by itself; see `Server.has_ended`."""
        return self._termination.done()

    async def drain(self) -> None:
        """Refuse new calls, let running ones finish within `server.drain_timeout_s`, and stop."""
        self._health.enter_graceful_shutdown()
        self._receiver.refuse_new()
        await self._receiver.wait_for_calls(self._config.drain_timeout_s)
        if self._disaggregated is not None:
            await self._disaggregated.finish()
        if self._port is not None:
            await end_connections({self._port}, _FLUSH_S)
            self._port = None
        await self._grpc.stop(_FLUSH_S)


def _limits(facts: ReplicaFacts) -> Limits:
    """Return the limits on messages. Replicas check everything else."""
    return Limits(
        model=facts.model,
        device="",
        vocab_size=facts.vocab_size,
        max_prompt_tokens=facts.max_prompt_tokens,
        max_sequence_tokens=facts.max_prompt_tokens,
        block_size=1,
        epoch=0,
        ceiling_tokens={},
        default_ceiling_tokens=None,
        pool_tokens=facts.max_prompt_tokens,
        max_model_tokens=facts.max_prompt_tokens,
        model_limit_reason="the replicas compute no more",
    )
