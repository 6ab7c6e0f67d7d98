"""The gRPC server of one engine: its services, health, reflection and graceful shutdown.

bind -> serving -> draining (health NOT_SERVING, new requests UNAVAILABLE, running ones finish)
     -> connections are closed -> stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc.aio

from radixkv.config import Config, ServerConfig
from radixkv.errors import Draining, InvariantViolation
from radixkv.events.readers import EventReaders
from radixkv.service.server.auth.authorizer import Authorizer
from radixkv.service.server.auth.server_auth import ServerAuth
from radixkv.service.server.connections import end_connections
from radixkv.service.server.guarded_server import CountRefusal, GuardedServer
from radixkv.service.server.listen_address import bind_port, host_port
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.process_tuning import frozen_survivors, short_gil_switch_interval
from radixkv.service.server.receive.grpc_options import grpc_server
from radixkv.service.server.receive.receiver import Receiver
from radixkv.service.server.servicers.cache import CacheServicer
from radixkv.service.server.servicers.events import SERVICE as EVENT_SERVICE
from radixkv.service.server.servicers.events import EventServicer
from radixkv.service.server.servicers.explanations import Explainer
from radixkv.service.server.servicers.health_status import HealthStatus
from radixkv.service.server.servicers.model import ModelServicer
from radixkv.service.server.servicers.prefill import PrefillServicer
from radixkv.service.server.servicers.standard_services import add_standard_services, log_missing_services
from radixkv.service.server.shared_parts import SharedParts
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
    from radixkv.service.http.http_port import HttpPort

SERVICES = (
    prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
ADMIN_SERVICES = (cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HEALTH_PERIOD_S = 1.0
# Time in which written responses reach their callers, and in which clients close their connections. It is also gRPC's
# grace period, since health watches never end by themselves.
_FLUSH_S = 1.0

_logger = logging.getLogger(__name__)


class Server:
    """A gRPC server for one engine, which it does not own. Create it inside the event loop that runs it.

    Args:
        engine: answers requests.
        config: addresses, limits and the drain timeout.
        model_path: the model whose tokenizer is served, see `ModelTokenizer`; None for a model without files.
        gateway: the whole configuration, from which the gateway's service is created if `gateway.enabled` is set; None
            for no gateway.
        count_refusal: is called with the exception of each call that is refused by the server, and not by the engine.
        auth: authenticates and authorizes callers; by default as configured.

    Attributes:
        stop: set when the server should drain, by `Drain` or by the owner of the server.
        admin_address: `HOST:PORT` of the admin port, after `start`; None without an admin port.
        http_address: `HOST:PORT` of the HTTP port, after `start`; None without an HTTP port.

    Raises:
        ConfigError: a file of credentials or certificates, or a section `kv_sources`, cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        model_path: str | None = None,
        gateway: Config | None = None,
        count_refusal: CountRefusal | None = None,
        auth: ServerAuth | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self.stop = asyncio.Event()
        self.admin_address: str | None = None
        self.http_address: str | None = None
        self._http: HttpPort | None = None
        self._auth = auth or ServerAuth(config)
        self._count_refusal = count_refusal
        self._health = HealthStatus()
        self._health_watch: asyncio.Task[None] | None = None
        self._terminations: list[asyncio.Future[Any]] = []
        self._ports: set[int] = set()
        self.receiver = Receiver(config, engine.limits)
        tokenizer = ModelTokenizer(model_path)
        explainer = Explainer(engine, tokenizer)
        cache_servicer = CacheServicer(engine, self.stop.set, tokenizer, explainer)
        if gateway is not None and not gateway.gateway.enabled:
            gateway = None
        gateway_tenant = "" if gateway is None else gateway.gateway.tenant
        self._grpc, guarded_server = self._grpc_server(self._auth.authorizer(gateway_tenant))
        self._service_names = self._add_services(guarded_server, cache_servicer, tokenizer, explainer, gateway)
        add_standard_services(guarded_server, self._health, self._service_names)
        self._admin_grpc: grpc.aio.Server | None = None
        admin_authorizer = self._auth.admin_authorizer()
        if admin_authorizer is not None:
            self._admin_grpc, guarded_server = self._grpc_server(admin_authorizer)
            cache_pb2_grpc.add_CacheServiceServicer_to_server(cache_servicer, guarded_server)  # type: ignore[no-untyped-call]
            add_standard_services(guarded_server, self._health, ADMIN_SERVICES)

    def _grpc_server(self, authorizer: Authorizer) -> tuple[grpc.aio.Server, GuardedServer]:
        """Return a gRPC server without services, and the `GuardedServer` that adds services to it."""
        server = grpc_server(self._config, self._engine.limits)
        return server, GuardedServer(server, authorizer, self.receiver, self._count_refusal)

    def _add_services(
        self,
        guarded_server: GuardedServer,
        cache_servicer: CacheServicer,
        tokenizer: ModelTokenizer,
        explainer: Explainer,
        gateway: Config | None,
    ) -> tuple[str, ...]:
        """Create the HTTP port, add all services except health and reflection to the main port, return their names."""
        engine = self._engine
        grammars = Grammars(tokenizer, engine.limits.vocab_size, engine.eos_token_ids)
        readers = None if engine.events is None else EventReaders(engine.events)
        shared = SharedParts(readers, tokenizer, grammars, explainer, self.receiver.held_bytes)
        prefill_servicer = PrefillServicer(engine, shared, self._config)
        if self._config.http_port is not None:
            self._http = self._http_port(prefill_servicer, cache_servicer, tokenizer)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill_servicer, guarded_server)  # type: ignore[no-untyped-call]
        cache_pb2_grpc.add_CacheServiceServicer_to_server(cache_servicer, guarded_server)  # type: ignore[no-untyped-call]
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(tokenizer), guarded_server)  # type: ignore[no-untyped-call]
        service_names = [*SERVICES]
        if readers is not None:
            events = EventServicer(readers, engine.limits.epoch)
            events_pb2_grpc.add_EventServiceServicer_to_server(events, guarded_server)  # type: ignore[no-untyped-call]
            service_names.append(EVENT_SERVICE)
        if gateway is not None:
            # The package smg-grpc-proto also registers the names of the gateway's messages, and a process can register
            # them only once. So they are imported only for a gateway.
            from radixkv.service.server.gateway.servicer import add_gateway

            service_names.append(add_gateway(guarded_server, shared, engine, gateway))
        return tuple(service_names)

    def _http_port(
        self, servicer: PrefillServicer, cache_servicer: CacheServicer, tokenizer: ModelTokenizer
    ) -> HttpPort:
        """Return the HTTP port. Its package is imported only here, because it requires aiohttp."""
        from radixkv.service.http.http_port import HttpPort
        from radixkv.service.server.page.page import Page
        from radixkv.service.server.page.state_feed import StateFeed

        engine = self._engine
        return HttpPort(
            self._config,
            engine.limits,
            servicer,
            cache_servicer.Retain,
            tokenizer,
            self._auth.authorizer(),
            self.receiver,
            self._auth.tls,
            lambda: engine.is_healthy,
            Page(StateFeed(engine), has_api=True),
            self._count_refusal,
        )

    async def start(self) -> str:
        """Bind and serve.

        Returns:
            `HOST:PORT` with the port that was bound.

        Raises:
            ConfigError: one of the addresses cannot be bound; nothing is served.
        """
        port = self._bind(self._grpc, "server.port", self._config.port)
        if self._admin_grpc is not None and self._config.admin_port is not None:
            admin_port = self._bind(self._admin_grpc, "server.admin_port", self._config.admin_port)
            self.admin_address = host_port(self._config.host, admin_port)
        if self._http is not None:
            self.http_address = await self._http.start()
        self._set_health()
        for server in self._grpc_servers():
            await server.start()
        if self.admin_address is not None:
            _logger.info("admin port: %s", self.admin_address)
        self._terminations = [
            asyncio.gather(server.wait_for_termination(), return_exceptions=True) for server in self._grpc_servers()
        ]
        self._health_watch = asyncio.create_task(self._watch_health())
        return host_port(self._config.host, port)

    @property
    def has_ended(self) -> bool:
        """Whether gRPC has stopped serving: after `drain`, or by itself, after an error of its own.

        If it has stopped by itself, the process should be restarted.
        """
        return any(termination.done() for termination in self._terminations)

    async def drain(self) -> bool:
        """Refuse new requests, let running ones finish, then stop.

        Health reports NOT_SERVING before the first request is refused. Requests that still run after `drain_timeout_s`
        are cancelled. Other calls, such as `Stats`, are answered until the last request has finished; then every call
        except health checks is refused.

        On Linux, the TCP connections are closed directly after the last response, and not by gRPC; see `connections`.
        So a client receives every response, and a call that arrives too late fails with UNAVAILABLE.

        Returns:
            Whether every request finished in time, and every response was sent.
        """
        _logger.info("draining, at most %g s", self._config.drain_timeout_s)
        if self._health_watch is not None:
            self._health_watch.cancel()
        self._health.enter_graceful_shutdown()
        if self._engine.events is not None:
            self._engine.events.close(Draining("service: shutting down"))
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._config.drain_timeout_s
        try:
            all_finished = await asyncio.to_thread(self._engine.drain, self._config.drain_timeout_s)
            self.receiver.refuse_new()
            all_sent = await self.receiver.wait_for_calls(max(_FLUSH_S, end_s - loop.time()))
        finally:
            await end_connections(self._ports, _FLUSH_S)
            self._ports.clear()
            if self._http is not None:
                await self._http.stop()
            await asyncio.gather(*(server.stop(_FLUSH_S) for server in self._grpc_servers()))
        return all_finished and all_sent

    def _grpc_servers(self) -> list[grpc.aio.Server]:
        return [server for server in (self._grpc, self._admin_grpc) if server is not None]

    def _bind(self, server: grpc.aio.Server, key: str, port: int) -> int:
        """Bind a port and return its number. `key` names it in errors."""
        bound = bind_port(server, self._config.host, key, port, self._auth.tls)
        self._ports.add(bound)
        return bound

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_PERIOD_S)
            self._set_health()

    def _set_health(self) -> None:
        self._health.set(self._service_names, is_serving=self._engine.is_healthy)


def run(
    engine: Engine,
    config: ServerConfig,
    model_path: str | None = None,
    gateway: Config | None = None,
    count_refusal: CountRefusal | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM, SIGINT or a call of `Drain`, drain, and return. For the other arguments, see `Server`.

    Further signals have no effect until the engine has stopped, which takes a limited time.

    Starts the engine, and stops it in every case. Prints one line, `listening on HOST:PORT`, on stdout when ready.
    Until this function returns, long-lived objects are exempt from garbage collection, and the GIL switch interval is
    at most 1 ms.

    Args:
        on_ready: is called once, just before the line is printed.

    Raises:
        ConfigError: as `Server` and `Server.start`.
        InvariantViolation: the engine's thread or gRPC's server ended. The process should be restarted.
    """

    def make_server() -> Server:
        return Server(engine, config, model_path, gateway, count_refusal)

    with frozen_survivors(), short_gil_switch_interval():
        engine.start()
        try:
            asyncio.run(serve_until_signal(engine, make_server, on_ready))
        finally:
            # The event loop has removed its signal handlers, and no signal may interrupt `stop`, which saves the cache.
            with _ignored_signals():
                engine.stop()


@contextlib.contextmanager
def _ignored_signals() -> Iterator[None]:
    previous_handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


async def serve_until_signal(
    engine: Engine, make_server: Callable[[], Server], on_ready: Callable[[], None] = lambda: None
) -> None:
    """Make a server, serve until a signal or `Drain`, and drain.

    Args:
        engine: the server's engine.
        make_server: makes the server, inside the event loop.
        on_ready: is called once, before the address is printed.

    Raises:
        ConfigError: as `Server` and `Server.start`.
        InvariantViolation: as `run`.
    """
    server = make_server()
    for number in _STOP_SIGNALS:
        # Further signals have no effect, because the drain ends after its timeout.
        asyncio.get_running_loop().add_signal_handler(number, server.stop.set)
    log_missing_services()
    address = await server.start()
    on_ready()
    print(f"listening on {address}", flush=True)
    while not server.stop.is_set() and engine.is_alive and not server.has_ended:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.stop.wait(), _HEALTH_PERIOD_S)
    has_grpc_ended = server.has_ended  # before `drain` ends it
    if await server.drain():
        _logger.info("stopped")
    else:
        _logger.warning("stopped; not all requests were answered")
    if not engine.is_alive:
        raise InvariantViolation("engine: its thread ended while the server was running")
    if has_grpc_ended:
        raise InvariantViolation("server: gRPC stopped serving while the server was running")
