"""Services that a server has only if the configuration says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio

from radixkv.config import Config
from radixkv.service.server.shared_parts import SharedParts

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

AddService = Callable[[grpc.aio.Server, SharedParts], str]
"""Adds a service to a server, inside its event loop, and returns the service's name."""


def optional_services(engine: Engine, config: Config) -> list[AddService]:
    """Return what adds the services that the configuration asks for.

    The gateway's messages have names of another project, and a process can have one copy of them only. So they are
    imported only where they are served.
    """
    if not config.gateway.enabled:
        return []
    from radixkv.service.server.gateway.servicer import add_gateway

    return [partial(add_gateway, engine=engine, config=config)]
