"""Publishes cache events over ZMQ while a service runs, if configured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from radixkv.config import EventsConfig
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

_logger = logging.getLogger(__name__)


def require_publishable(config: EventsConfig, *, is_insecure: bool = False, has_tokens: bool = False) -> None:
    """Refuse a configuration of events that cannot be published, before a model is loaded.

    ```
                         no CURVE           CURVE
    this machine         open to all users  readers with a key
    network              refused            readers with a key
    network, insecure    open to all        readers with a key
    ```

    Args:
        config: the addresses and keys.
        is_insecure: whether every process that can reach an address may read the events.
        has_tokens: whether callers of the service need a credential. If they do, the log warns that readers need none.

    Raises:
        ConfigError: a package is missing (the message names the extra), an address cannot be bound, a reader on another
            machine would need no key, or there is a replay endpoint or a key without `zmq_endpoint`.
    """
    if config.zmq_endpoint is None:
        for key in ("replay_endpoint", "curve_key_file", "curve_clients"):
            if getattr(config, key) is not None:
                raise ConfigError(f"events.{key}: requires events.zmq_endpoint")
        return
    require_package("events.zmq_endpoint", "msgpack", "msgpack", "events")
    from radixkv.events.zmq_publisher import require_addresses

    for address in require_addresses(config):
        if config.curve_key_file is not None:
            continue
        if not address.is_local and not is_insecure:
            raise ConfigError(
                f"events.{address.key}: expected an address of this machine, such as tcp://127.0.0.1:5557, without "
                f"events.curve_key_file and events.curve_clients, got {address.endpoint!r}; --insecure publishes the "
                "tokens of prompts to anyone who can reach it"
            )
        if not address.is_local or has_tokens:
            _logger.warning(
                "anyone who can connect to %s may read the prompts of tenant gateway.tenant: there is no "
                "events.curve_key_file",
                address.endpoint,
            )


@contextlib.contextmanager
def publishing(engine: Engine, config: EventsConfig) -> Iterator[None]:
    """Publish cache events while the context lasts, and log the addresses. Does nothing if no address is configured.

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
