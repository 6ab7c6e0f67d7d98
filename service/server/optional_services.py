"""Services that a server offers only if the configuration enables them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from radixkv.config import Config
from radixkv.service.server.guarded_server import GuardedServer
from radixkv.service.server.shared_parts import SharedParts

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine


AddService = Callable[[GuardedServer, SharedParts], str]
"""Adds a service to a server, inside its event loop, and returns the service's name."""


def optional_services(engine: Engine, config: Config) -> list[AddService]:
    """Return functions that add the services which the configuration enables.

    The names of the gateway's messages are also registered by the package smg-grpc-proto, and a process can register
    them only once. So they are imported only if the gateway is enabled.
    """
    if not config.gateway.enabled:
        return []
    from radixkv.service.server.gateway.servicer import add_gateway

    return [partial(add_gateway, engine=engine, config=config)]
