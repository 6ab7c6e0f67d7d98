"""The gRPC server: services, health, reflection and drain.

bind -> serving -> draining (health NOT_SERVING, new requests UNAVAILABLE, running ones finish) -> stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from radixkv.config import ServerConfig
from radixkv.errors import Draining, InvariantViolation
from radixkv.events.readers import EventReaders
from radixkv.service.server.events.servicer import SERVICE as EVENT_SERVICE
from radixkv.service.server.events.servicer import EventServicer
from radixkv.service.server.intake.bounds import grpc_options
from radixkv.service.server.intake.deadlines import Deadlines
from radixkv.service.server.intake.intake import Intake
from radixkv.service.server.listen_address import host_port, not_free
from radixkv.service.server.model_servicer import ModelServicer
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.optional_services import AddService
from radixkv.service.server.servicer import CacheServicer, PrefillServicer
from radixkv.service.server.shared_parts import SharedParts
from radixkv.service.server.status import StatusInterceptor
from radixkv.service.server.unfinished_calls import UnfinishedCalls
from radixkv.service.structured.grammars import Grammars
from radixkv.v1 import cache_pb2, cache_pb2_grpc, model_pb2, model_pb2_grpc, prefill_pb2, prefill_pb2_grpc

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

SERVICES = (
    prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_HEALTH_PERIOD_S = 1.0
# Written answers have this long to reach their callers. Calls that watch the health never end by themselves.
_FLUSH_S = 1.0

_logger = logging.getLogger(__name__)


class Server:
    """A gRPC server over one engine, which it does not own. To be made inside the event loop that runs it.

    Args:
        engine: answers requests.
        config: where to listen, and for how long to drain.
        model_path: where the files beside the model's weights are: `tiny` or a directory; None for none.
        services: add more services; see `optional_services`.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        model_path: str | None = None,
        services: Iterable[AddService] = (),
    ) -> None:
        self._engine = engine
        self._config = config
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # behind a version check
        self._health_watch: asyncio.Task[None] | None = None
        self._unfinished = UnfinishedCalls()
        self._grpc = grpc.aio.server(
            interceptors=[StatusInterceptor(Intake(config, engine.limits, self._unfinished))],
            options=grpc_options(config, engine.limits),
            maximum_concurrent_rpcs=config.max_calls,
        )
        tokenizer = ModelTokenizer(model_path)
        grammars = Grammars(tokenizer, engine.limits.vocab_size, engine.eos_token_ids)
        prefill_servicer = PrefillServicer(engine, tokenizer, grammars, Deadlines.of(config))
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill_servicer, self._grpc)  # type: ignore[no-untyped-call]
        cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheServicer(engine), self._grpc)  # type: ignore[no-untyped-call]
        model_servicer = ModelServicer(tokenizer)
        model_pb2_grpc.add_ModelServiceServicer_to_server(model_servicer, self._grpc)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        own_services = [*SERVICES]
        readers = None if engine.events is None else EventReaders(engine.events)
        if readers is not None:
            events = EventServicer(readers, engine.limits.epoch)
            self._grpc.add_generic_rpc_handlers((events.handler(),))
            own_services.append(EVENT_SERVICE)
        shared = SharedParts(readers, tokenizer, grammars)
        self._services = (*own_services, *(add(self._grpc, shared) for add in services))
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)

    async def start(self) -> str:
        """Bind and serve.

        Returns:
            `HOST:PORT` with the port that was taken.

        Raises:
            ConfigError: the address can't be bound; nothing is served.
        """
        host, port = self._config.host, self._config.port
        try:
            port = self._grpc.add_insecure_port(host_port(host, port))
        except RuntimeError as error:
            raise not_free("server.port", host, port) from error
        await self._set_health()
        await self._grpc.start()
        self._health_watch = asyncio.create_task(self._watch_health())
        return host_port(host, port)

    async def drain(self) -> bool:
        """Refuse new requests, let running ones finish, then stop.

        Health turns NOT_SERVING before the first refusal. Requests still running after `drain_timeout_s` are cancelled.

        Answers leave before connections end: a socket that is closed while the caller still sends, if only a window
        update, is reset and loses the bytes that it holds. gRPC closes a connection after it sent GOAWAY and the last
        call is over. So GOAWAY is sent after the last answer, and its acknowledgement says that the caller has read
        everything before it.

        Returns:
            Whether every request finished in time, and every answer left.
        """
        if self._health_watch is not None:
            self._health_watch.cancel()
        await self._health.enter_graceful_shutdown()
        if self._engine.events is not None:
            self._engine.events.close(Draining("service: expected to be serving, got draining"))
        end = asyncio.get_running_loop().time() + self._config.drain_timeout_s
        try:
            are_over = await asyncio.to_thread(self._engine.drain, self._config.drain_timeout_s)
            have_left = await self._unfinished.finish(max(_FLUSH_S, end - asyncio.get_running_loop().time()))
        finally:
            await self._grpc.stop(_FLUSH_S)
        return are_over and have_left

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_PERIOD_S)
            await self._set_health()

    async def _set_health(self) -> None:
        status = _SERVING if self._engine.is_healthy else _NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)


def run(
    engine: Engine, config: ServerConfig, model_path: str | None = None, services: Iterable[AddService] = ()
) -> None:
    """Serve until SIGTERM or SIGINT, drain, and return. The arguments are those of `Server`.

    Starts the engine, and stops it at every exit. Prints one line, `listening on HOST:PORT`, on stdout when ready.
    Objects that exist at the start are exempt from garbage collection until the end.

    Raises:
        ConfigError: the address can't be bound.
        InvariantViolation: the engine's thread ended by itself. A supervisor should restart the process.
    """
    gc.collect()
    gc.freeze()  # a collection that walks modules and model stops every request for 0.2 s
    engine.start()
    try:
        asyncio.run(_serve_until_signal(engine, config, model_path, services))
    finally:
        engine.stop()
        gc.unfreeze()  # otherwise nanobind, which Triton uses, reports leaks on stderr at exit


async def _serve_until_signal(
    engine: Engine, config: ServerConfig, model_path: str | None, services: Iterable[AddService]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)  # further signals change nothing: the drain ends by itself
    server = Server(engine, config, model_path, services)
    address = await server.start()
    print(f"listening on {address}", flush=True)
    while not stop.is_set() and engine.is_alive:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _HEALTH_PERIOD_S)
    if not engine.is_alive:
        raise InvariantViolation("engine: expected its thread to run until the server stops, got a thread that ended")
    _logger.info("draining, at most %g s", config.drain_timeout_s)
    if await server.drain():
        _logger.info("stopped")
    else:
        _logger.warning("stopped; not all requests were answered")
