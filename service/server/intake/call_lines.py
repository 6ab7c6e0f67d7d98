"""The lines in which gRPC keeps calls that no handler has taken yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

# Prompts, and what orchestrators ask. All other methods share one line, but that of reflection, which adds itself.
_OWN_LINE = {
    "radixkv.v1.PrefillService": ("Prefill", "Generate"),
    "grpc.health.v1.Health": ("Check",),
}

Handlers = Mapping[str, Any]


class CallLines:
    """Adds services to a gRPC server; few of their methods get a line of their own.

    gRPC takes the first call of each line in each round of the event loop. So a flood of one method does not keep
    another one waiting that has its own line. But every call of any method waits at all lines and leaves them again:
    with a line for each of 22 methods a call took 8 % more processor time. Generated code asks for that.

    Args:
        server: gets the services.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]) -> None:
        """Add handlers, as gRPC's server does."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        """Give a line to the methods of a service that are to have one, out of all handlers."""
        own = {name: handler for name, handler in handlers.items() if name in _OWN_LINE.get(service, ())}
        self._server.add_registered_method_handlers(service, own)  # type: ignore[attr-defined]  # not in its stubs
