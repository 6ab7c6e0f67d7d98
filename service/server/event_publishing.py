"""Publishes cache events over ZMQ while a service runs, if configured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from radixkv.config import EventsConfig
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError

if TYPE_CHECKING:  # ZMQ is needed only where events are published
    from radixkv.engine.engine import Engine

_PACKAGES = {"zmq": "pyzmq", "msgpack": "msgpack"}

_logger = logging.getLogger(__name__)


def require_publishable(config: EventsConfig) -> None:
    """Refuse a configuration that cannot be served, before a model is loaded.

    Raises:
        ConfigError: a package is missing (the message names the extra), an address cannot be bound, or there is a
            replay endpoint without an endpoint.
    """
    if config.zmq_endpoint is None:
        if config.replay_endpoint is not None:
            raise ConfigError("events.zmq_endpoint: expected an address with events.replay_endpoint, got none")
        return
    for module, package in _PACKAGES.items():
        require_package("events.zmq_endpoint", module, package, "events")
    from radixkv.events.zmq_publisher import require_addresses

    require_addresses(config)


@contextlib.contextmanager
def publishing(engine: Engine, config: EventsConfig) -> Iterator[None]:
    """Publish while the context lasts, and log the addresses.

    Raises:
        ConfigError: an address cannot be bound.
    """
    if config.zmq_endpoint is None or engine.events is None:
        yield
        return
    from radixkv.events.zmq_publisher import ZmqPublisher

    with contextlib.closing(ZmqPublisher(engine.events, config)) as publisher:
        replays = publisher.replay_endpoint
        _logger.info("events on %s, %s", publisher.endpoint, f"replays on {replays}" if replays else "no replays")
        yield
