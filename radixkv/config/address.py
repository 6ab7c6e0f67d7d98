"""Parses addresses in the configuration."""

from __future__ import annotations

from radixkv.errors import ConfigError

_MAX_PORT = 65_535


def host_and_port(key: str, address: str) -> tuple[str, int]:
    """Split an address `HOST:PORT` at its last colon.

    >>> host_and_port("tiers.mooncake_master", "10.0.0.5:50051")
    ('10.0.0.5', 50051)

    Raises:
        ConfigError: `address` has another form. The message names the key.
    """
    if not address:
        raise ConfigError(f"{key}: an address HOST:PORT is required")
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= _MAX_PORT):
        raise ConfigError(f"{key}: expected HOST:PORT with a port from 1 to {_MAX_PORT}, got {address!r}")
    return host, int(port)
