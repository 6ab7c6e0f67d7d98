"""A replica of a fleet: one engine and its gRPC server in a process of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
from typing import Any

from radixkv.config import Config, ServerConfig
from radixkv.service.fleet.authentication import replica_auth
from radixkv.service.fleet.replica_facts import FleetSecrets, ReplicaFacts
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.servicers.engine_calls import result_of
from radixkv.startup.openmp_threads import bound_spinning
from radixkv.telemetry.otlp import exported_spans

CALLS = "calls"
"""Name of the metric that a fleet is autoscaled by."""

# The limit on calls of a replica, as a multiple of `max_calls`. The ingress makes at most twice `max_calls` calls; the
# rest is for clients that use `Route`.
_TIMES_MAX_CALLS = 4
_MAX_INT32 = 2**31 - 1
_YEAR_S = 366 * 24 * 3600

_log = logging.getLogger(__name__)


class Replica:
    """An engine with its own server, supervised by Ray.

    Requests do not pass through Ray: the ingress, and clients that use `Route`, call the server over gRPC. Ray starts
    the process, checks its health, restarts it if it ends, and drains it before it stops it.

    Args:
        config: configuration of the engine and the server. The server picks a free port, and has no admin, HTTP or
            metrics port.
        secrets: secrets of the fleet.
        host: address to listen on; `node` for the address of this machine in the Ray cluster.
    """

    async def __init__(self, config: Config, secrets: FleetSecrets, host: str) -> None:  # type: ignore[misc]  # Ray awaits it
        bound_spinning(os.environ)
        from radixkv.engine.transfer.transfer import FleetAccess
        from radixkv.service.server.process_tuning import frozen_survivors
        from radixkv.service.server.server import Server
        from radixkv.startup.build_engine import build_engine
        from radixkv.statements.day_files import DayFiles

        self._config = config
        self._resources = contextlib.ExitStack()
        tracing = self._resources.enter_context(exported_spans(config.telemetry))
        observers = () if tracing is None else (tracing,)
        self._engine = await asyncio.to_thread(
            build_engine,
            _with_transfer(config),
            observers,
            secrets.events_key,
            open_day_files=DayFiles.open_for_replica,
        )
        self._resources.callback(self._engine.stop)
        if self._engine.transfer is not None:
            fleet = config.fleet
            self._engine.transfer.join(FleetAccess(secrets.token, secrets.kv_key, fleet.tls_ca, fleet.tls_name))
        self._resources.enter_context(frozen_survivors())
        self._engine.start()
        server_config = replica_server(config, _address_of_node() if host == "node" else host)
        self._mailbox = Mailbox()
        self._server = Server(
            self._engine,
            server_config,
            config.model.path,
            config,
            auth=replica_auth(server_config, secrets.token),
        )
        limits = self._engine.limits
        self._facts = ReplicaFacts(
            address=await self._server.start(),
            epoch=limits.epoch,
            model=limits.model,
            fingerprint=limits.model_fingerprint,
            vocab_size=limits.vocab_size,
            max_prompt_tokens=limits.max_prompt_tokens,
            event_block_size=config.events.block_size,
            open_tenant=config.gateway.tenant,
            max_deadline_s=server_config.max_deadline_s,
            secrets=secrets,
        )
        _log.info("replica listens on %s", self._facts.address)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata for the router. Ray calls this once and passes the result to every router."""
        return self._facts.to_metadata()

    async def check_health(self) -> None:
        """Raise an error if the process should be replaced. Ray calls this every few seconds."""
        if self._server.has_ended:
            raise RuntimeError("server: gRPC has stopped serving")
        if not self._engine.is_healthy:
            raise RuntimeError("engine: a step has stalled, or several steps have failed")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of running and waiting requests. Ray calls this every few seconds."""
        load = await result_of(self._engine, self._mailbox, self._engine.load())
        return {CALLS: float(load.requests.running + load.requests.waiting)}

    async def __del__(self) -> None:
        """Let running requests finish, then stop. Ray calls this after it has removed the replica from routing."""
        if hasattr(self, "_facts"):
            await self._server.drain()
        if hasattr(self, "_resources"):
            self._resources.close()


def _with_transfer(config: Config) -> Config:
    """Return the configuration with `transfer.serve`, so that other replicas can fetch K/V."""
    return dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, serve=True))


def replica_server(config: Config, host: str) -> ServerConfig:
    """Return the configuration of a replica's server: a free port, and TLS only if `fleet.tls_ca` is set.

    Only the ingress verifies client certificates; it authenticates to replicas with a token. To a replica, all clients
    of the ingress are one client on one connection. The ingress limits the number of their calls to twice `max_calls`,
    and the duration of a call to `max_deadline_s`. The limits of replicas are higher, so that a replica neither refuses
    a call because of other clients' calls, nor closes the connection because another client reads slowly.
    """
    has_tls = config.fleet.tls_ca is not None
    max_calls = min(_TIMES_MAX_CALLS * config.server.max_calls, _MAX_INT32)
    return dataclasses.replace(
        config.server,
        host=host,
        port=0,
        metrics_port=None,
        http_port=None,
        admin_port=None,
        tls_certificate=config.server.tls_certificate if has_tls else None,
        tls_key=config.server.tls_key if has_tls else None,
        client_ca=None,
        max_calls=max_calls,
        send_timeout_s=min(config.server.max_deadline_s + config.server.send_timeout_s, _YEAR_S),
        max_connection_calls=max(max_calls, config.server.max_connection_calls),
    )


class ReplicasForLoad:
    """Ray's autoscaling policy: the number of running and waiting calls divided by a target per replica.

    Args:
        calls_per_replica: the target.
    """

    def __init__(self, calls_per_replica: float) -> None:
        self._calls_per_replica = calls_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state. `context` is Ray's `AutoscalingContext`."""
        calls = (context.aggregated_metrics or {}).get(CALLS, {})
        num_replicas = math.ceil(sum(calls.values()) / self._calls_per_replica)
        max_replicas, min_replicas = context.capacity_adjusted_max_replicas, context.capacity_adjusted_min_replicas
        return max(min_replicas, min(max_replicas, num_replicas)), {}


def _address_of_node() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address
