"""The gRPC server: services, health, reflection and drain.

bind -> serving -> draining (health NOT_SERVING, new requests UNAVAILABLE, running ones finish)
     -> connections end -> stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc.aio

from radixkv.config import ServerConfig
from radixkv.errors import Draining, InvariantViolation, RadixKVError
from radixkv.events.readers import EventReaders
from radixkv.service.server.events.servicer import SERVICE as EVENT_SERVICE
from radixkv.service.server.events.servicer import EventServicer
from radixkv.service.server.garbage.survivors import frozen_survivors
from radixkv.service.server.health.health_status import HealthStatus
from radixkv.service.server.identity.doors import Door, Doors
from radixkv.service.server.identity.gate import Gate
from radixkv.service.server.intake.bounds import bounded_server
from radixkv.service.server.intake.deadlines import Deadlines
from radixkv.service.server.intake.entry import Entry
from radixkv.service.server.intake.intake import Intake
from radixkv.service.server.intake.lock_turns import short_lock_turns
from radixkv.service.server.last_connections import end_connections
from radixkv.service.server.listen_address import host_port, not_free
from radixkv.service.server.model_servicer import ModelServicer
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.optional_services import AddService
from radixkv.service.server.servicer import CacheServicer, PrefillServicer
from radixkv.service.server.shared_parts import SharedParts
from radixkv.service.server.standard_services import add_standard_services, log_missing_services
from radixkv.service.server.status import StatusInterceptor
from radixkv.service.server.transfer.kv_sources import sources_of
from radixkv.service.server.unfinished_calls import UnfinishedCalls
from radixkv.service.structured.grammars import Grammars
from radixkv.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    events_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

SERVICES = (
    prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
ADMIN_SERVICES = (cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,)

_HEALTH_PERIOD_S = 1.0
# Written answers have this long to reach their callers. Calls that watch the health never end by themselves.
_FLUSH_S = 1.0

CountRefusal = Callable[[RadixKVError], None]

_logger = logging.getLogger(__name__)


class Server:
    """A gRPC server over one engine, which it does not own. To be made inside the event loop that runs it.

    Args:
        engine: answers requests.
        config: where to listen, and for how long to drain.
        model_path: where the files beside the model's weights are: `tiny` or a directory; None for none.
        services: add more services; see `optional_services`.
        gateway_tenant: the owner of the gateway's data.
        count_refusal: is called with the exception of each call that is refused before the engine knows of it.
        doors: who is authenticated on which port; None for what the configuration says.

    Attributes:
        stop: set when the service should drain: by a caller of `Drain`, or by whoever runs the server.
        admin_address: `HOST:PORT` of the calls of admins, once started; None without a port of their own.

    Raises:
        ConfigError: a file of credentials or certificates, or of a source's token, can't be used.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        model_path: str | None = None,
        services: Iterable[AddService] = (),
        gateway_tenant: str = "",
        count_refusal: CountRefusal | None = None,
        doors: Doors | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self.stop = asyncio.Event()
        self.admin_address: str | None = None
        self._doors = Doors(config) if doors is None else doors
        self._sources = sources_of(engine)
        self._gateway_tenant = gateway_tenant
        self._count_refusal = count_refusal
        self._health = HealthStatus()
        self._health_watch: asyncio.Task[None] | None = None
        self._terminations: list[asyncio.Future[Any]] = []
        self._ports: set[int] = set()
        self._unfinished = UnfinishedCalls()
        self._intake = Intake(config, engine.limits, self._unfinished)
        self._grpc = self._made(self._doors.requests)
        cache_servicer = CacheServicer(engine, self.stop.set)
        self._services = self._add_services(cache_servicer, model_path, services)
        add_standard_services(self._grpc, self._health, self._services)
        self._admin_grpc = None if self._doors.admins is None else self._made(self._doors.admins)
        if self._admin_grpc is not None:
            cache_pb2_grpc.add_CacheServiceServicer_to_server(cache_servicer, self._admin_grpc)  # type: ignore[no-untyped-call]
            add_standard_services(self._admin_grpc, self._health, ADMIN_SERVICES)

    def _add_services(
        self, cache_servicer: CacheServicer, model_path: str | None, services: Iterable[AddService]
    ) -> tuple[str, ...]:
        """Add everything but health and reflection to the port of requests, and return the names."""
        engine, server = self._engine, self._grpc
        tokenizer = ModelTokenizer(model_path)
        grammars = Grammars(tokenizer, engine.limits.vocab_size, engine.eos_token_ids)
        self._readers = None if engine.events is None else EventReaders(engine.events)
        shared = SharedParts(self._readers, tokenizer, grammars, self._intake.held)
        prefill_servicer = PrefillServicer(engine, shared, Deadlines.of(self._config), self._sources)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill_servicer, server)  # type: ignore[no-untyped-call]
        cache_pb2_grpc.add_CacheServiceServicer_to_server(cache_servicer, server)  # type: ignore[no-untyped-call]
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(tokenizer), server)  # type: ignore[no-untyped-call]
        names = [*SERVICES]
        if self._readers is not None:
            events = EventServicer(self._readers, engine.limits.epoch)
            events_pb2_grpc.add_EventServiceServicer_to_server(events, server)  # type: ignore[no-untyped-call]
            names.append(EVENT_SERVICE)
        return (*names, *(add(server, shared) for add in services))

    async def start(self) -> str:
        """Bind and serve.

        Returns:
            `HOST:PORT` with the port that was taken.

        Raises:
            ConfigError: the address can't be bound; nothing is served.
        """
        port = self._bind(self._grpc, "server.port", self._config.port)
        if self._admin_grpc is not None and self._config.admin_port is not None:
            admin_port = self._bind(self._admin_grpc, "server.admin_port", self._config.admin_port)
            self.admin_address = host_port(self._config.host, admin_port)
        self._set_health()
        await self._grpc.start()
        if self._admin_grpc is not None:
            await self._admin_grpc.start()
            _logger.info("calls of admins on %s", self.admin_address)
        servers = [each for each in (self._grpc, self._admin_grpc) if each is not None]
        self._terminations = [asyncio.gather(each.wait_for_termination(), return_exceptions=True) for each in servers]
        self._health_watch = asyncio.create_task(self._watch_health())
        return host_port(self._config.host, port)

    @property
    def has_ended(self) -> bool:
        """Whether gRPC stopped serving by itself, after an error of its own. The process should be restarted then."""
        return any(termination.done() for termination in self._terminations)

    async def drain(self) -> bool:
        """Refuse new requests, let running ones finish, then stop.

        Health turns NOT_SERVING before the first refusal. Requests still running after `drain_timeout_s` are cancelled.
        Calls of other kinds are answered until the last request is; then everything but health checks is refused.

        Connections end after the last answer, in TCP and not by gRPC: see `last_connections`. So a client reads all
        answers, and a call that arrives too late is UNAVAILABLE.

        Returns:
            Whether every request finished in time, and every answer left.
        """
        _logger.info("draining, at most %g s", self._config.drain_timeout_s)
        if self._health_watch is not None:
            self._health_watch.cancel()
        self._health.leave()
        if self._engine.events is not None:
            self._engine.events.close(Draining("service: expected to be serving, got draining"))
        end = asyncio.get_running_loop().time() + self._config.drain_timeout_s
        try:
            are_over = await asyncio.to_thread(self._engine.drain, self._config.drain_timeout_s)
            self._intake.refuse_new()
            have_left = await self._unfinished.finish(max(_FLUSH_S, end - asyncio.get_running_loop().time()))
        finally:
            await end_connections(self._ports, _FLUSH_S)
            self._ports.clear()
            await asyncio.gather(*(each.stop(_FLUSH_S) for each in (self._grpc, self._admin_grpc) if each is not None))
        return are_over and have_left

    def _made(self, door: Door) -> grpc.aio.Server:
        """Make a gRPC server without services."""
        entry = Entry(Gate(door, self._gateway_tenant), self._intake, self._count_refusal)
        return bounded_server(self._config, self._engine.limits, StatusInterceptor(entry))

    def _bind(self, server: grpc.aio.Server, key: str, port: int) -> int:
        """Bind a port and return its number. `key` names it in errors."""
        address = host_port(self._config.host, port)
        try:
            if self._doors.tls is None:
                taken = server.add_insecure_port(address)
            else:
                taken = server.add_secure_port(address, self._doors.tls.grpc_credentials())
        except RuntimeError as error:
            raise not_free(key, self._config.host, port) from error
        self._ports.add(taken)
        return taken

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_PERIOD_S)
            self._set_health()

    def _set_health(self) -> None:
        self._health.set(self._services, is_serving=self._engine.is_healthy)


def run(
    engine: Engine,
    config: ServerConfig,
    model_path: str | None = None,
    services: Iterable[AddService] = (),
    gateway_tenant: str = "",
    count_refusal: CountRefusal | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM, SIGINT or a call of `Drain`, drain, and return. The arguments are those of `Server`.

    Starts the engine, and stops it at every exit. Prints one line, `listening on HOST:PORT`, on stdout when ready.
    Until the end, objects that live long are exempt from garbage collection, and threads take short turns.

    Args:
        on_ready: is called once, just before that line is printed.

    Raises:
        ConfigError: the address can't be bound.
        InvariantViolation: the engine's thread ended, or gRPC's server did. The process should be restarted.
    """
    rest = (model_path, tuple(services), gateway_tenant, count_refusal)
    with frozen_survivors(), short_lock_turns():
        engine.start()
        try:
            asyncio.run(_serve_until_signal(engine, lambda: Server(engine, config, *rest), on_ready))
        finally:
            engine.stop()


async def _serve_until_signal(
    engine: Engine, make_server: Callable[[], Server], on_ready: Callable[[], None] = lambda: None
) -> None:
    server = make_server()
    for number in (signal.SIGTERM, signal.SIGINT):
        # further signals change nothing: the drain ends by itself
        asyncio.get_running_loop().add_signal_handler(number, server.stop.set)
    log_missing_services()
    address = await server.start()
    on_ready()
    print(f"listening on {address}", flush=True)
    while not server.stop.is_set() and engine.is_alive and not server.has_ended:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.stop.wait(), _HEALTH_PERIOD_S)
    has_ended = server.has_ended
    if await server.drain():
        _logger.info("stopped")
    else:
        _logger.warning("stopped; not all requests were answered")
    if not engine.is_alive:
        raise InvariantViolation("engine: expected its thread to run until the server stops, got a thread that ended")
    if has_ended:
        raise InvariantViolation("server: expected gRPC to serve until the server stops, got a server that ended")
