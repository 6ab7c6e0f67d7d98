"""Accepts the calls of gRPC's asyncio server in one loop per method, so that no bytes from the network end a loop.

From grpcio 1.84 on, one loop accepts the calls of all methods. If a method is not registered, this loop decodes the
path of the call outside of any error handling. A path that is not UTF-8 raises UnicodeDecodeError there, which shuts
the server down: a single packet from a client without credentials aborts the calls of all clients. Before 1.84 the path
is decoded in the task of the call, which fails alone.

`AcceptingServer` replaces that loop. It knows the paths of registered methods without decoding them, and answers any
other call with UNIMPLEMENTED, whatever its path is. Hence all methods must be registered, as generated code does;
handlers that are only generic are never called. A flood of calls to one method does not delay calls to others, and the
cost of a call does not grow with the number of methods. Connections that begin calls only to reset them are closed, and
their further calls are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # an extension module

from radixkv.service.server.connections import close_connections
from radixkv.service.server.reset_floods import EARLY_S, ResetFloods
from radixkv.startup.malloc import give_back_freed_memory

# Private names of `cygrpc` from which `AcceptingServer` builds its loops; grpcio 1.84 and 1.85 have them. In versions
# without them, grpcio's own loop accepts the calls.
_CYGRPC_NAMES = ("_MethodResolver", "_ServicerContext", "_handle_rpc", "_schedule_rpc_coro")
_UNKNOWN_METHOD = "/"  # the path that stands for all unregistered methods, since no method has it
_FORGET_S = 5.0  # how long calls of a closed connection are dropped; afterwards a new connection may have its address
_LOG_PERIOD_S = 1.0
# Beginnings of records in gRPC's log that any client can cause, without credentials and as often as it likes: a
# response that can't be delivered because the client has disconnected, and metadata that is not UTF-8. The latter comes
# with a traceback and repeats the value, which may be that of `authorization`.
_RECORDS_OF_CLIENTS = ("ExecuteBatchError raised in core", "Invalid encoding on")

_logger = logging.getLogger(__name__)


def make_server(options: Sequence[tuple[str, Any]], max_concurrent_calls: int) -> grpc.aio.Server:
    """Return a gRPC server without services, as `grpc.aio.server` does, but one that invalid paths do not shut down.

    From then on, the log of gRPC has no records that clients can cause.

    Args:
        options: channel arguments of gRPC.
        max_concurrent_calls: number of calls beyond which further calls are answered with RESOURCE_EXHAUSTED.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(is_kept)  # has no effect from the second call on
    original_class = cygrpc.AioServer
    if hasattr(original_class, "_make_request_call_future"):
        if all(hasattr(cygrpc, name) for name in _CYGRPC_NAMES):
            cygrpc.AioServer = AcceptingServer
        else:
            _logger.warning(
                "grpcio %s accepts calls in a way that radixkv does not know: a call whose path is not UTF-8 may shut "
                "the server down; grpcio 1.85 is known to work",
                grpc.__version__,
            )
    try:
        return grpc.aio.server(options=options, maximum_concurrent_rpcs=max_concurrent_calls)
    finally:
        cygrpc.AioServer = original_class


def is_kept(record: logging.LogRecord) -> bool:
    """Return False for records of gRPC's log that clients can cause at will."""
    return not record.getMessage().startswith(_RECORDS_OF_CLIENTS)


class AcceptingServer(cygrpc.AioServer):  # type: ignore[misc]  # grpcio's extension module has no types
    """The Cython part of `grpc.aio.Server`, with one loop per method that accepts its calls.

    The arguments are those of `cygrpc.AioServer`; `max_concurrent_calls` bounds the calls of all methods together.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread_pool: object,
        generic_handlers: Sequence[object],
        interceptors: Sequence[object] | None,
        options: object,
        max_concurrent_calls: int | None,
        *further_arguments: object,
    ) -> None:
        super().__init__(loop, thread_pool, generic_handlers, interceptors, options, None, *further_arguments)
        self._event_loop = loop
        self._call_interceptors = tuple(interceptors or ())
        self._max_concurrent_calls = max_concurrent_calls
        self._handlers: dict[str, object] = {}
        self._calls: set[asyncio.Task[None]] = set()  # the event loop itself holds only weak references to tasks
        self._floods = ResetFloods()
        self._num_unlogged_floods = 0
        self._next_log_s = 0.0

    def add_registered_method_handlers(self, handlers: Mapping[str, object]) -> None:
        """Register methods, by their full names such as `/package.Service/Method`."""
        self._handlers.update(handlers)
        super().add_registered_method_handlers(handlers)

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[None]:
        """Return the loop that accepts the calls of a method; None stands for all unregistered methods.

        grpcio awaits the loop as if it were the next call. The loop ends when the server shuts down, with the error
        that grpcio then expects.
        """
        return self._event_loop.create_task(self._accept_calls(method))

    async def _accept_calls(self, method: bytes | None) -> None:
        resolver = cygrpc._MethodResolver([], self._handlers)
        name = _UNKNOWN_METHOD if method is None else method.decode()
        while True:
            call = await (self._request_call() if method is None else self._request_registered_call(method))
            context = cygrpc._ServicerContext(call, None, None, self._event_loop)
            peer = context.peer()
            if self._floods.is_closed(peer):
                continue  # gRPC ends a call that nothing refers to
            is_refused = self._max_concurrent_calls is not None and len(self._calls) >= self._max_concurrent_calls
            handler = cygrpc._handle_rpc(name, resolver, self._call_interceptors, call, self._event_loop, is_refused)
            task = self._event_loop.create_task(
                cygrpc._schedule_rpc_coro(handler, call, self._event_loop, name), name="rpc_task"
            )
            self._calls.add(task)
            task.add_done_callback(partial(self._note_end, context, peer, self._event_loop.time()))

    def _note_end(self, context: Any, peer: str, start_s: float, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not peer:  # the connection had ended before gRPC accepted the call
            return
        if context.done():
            self._floods.note_answer(peer)
        elif self._event_loop.time() - start_s < EARLY_S and self._floods.note_reset(peer):
            self._log_flood(peer)
            self._event_loop.run_in_executor(None, close_connections, frozenset({peer}))
            self._event_loop.call_later(_FORGET_S, self._forget, peer)

    def _log_flood(self, peer: str) -> None:
        """Log at most once per second, since a client can open new connections as often as it likes."""
        self._num_unlogged_floods += 1
        now_s = self._event_loop.time()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + _LOG_PERIOD_S
            _logger.warning(
                "closing the connection of %s, which begins calls only to reset them; %d such connections since the "
                "last of these lines",
                peer,
                self._num_unlogged_floods,
            )
            self._num_unlogged_floods = 0

    def _forget(self, peer: str) -> None:
        """Forget a closed connection. After the last one, return the memory that the flood has freed to the system."""
        if self._floods.forget(peer):
            self._event_loop.run_in_executor(None, give_back_freed_memory)
