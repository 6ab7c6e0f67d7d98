"""Reads the addresses that keys of a configuration hold."""

from __future__ import annotations

from radixkv.errors import ConfigError

_MAX_PORT = 65_535


def host_and_port(key: str, address: str) -> tuple[str, int]:
    """Take an address `HOST:PORT` apart.

    >>> host_and_port("tiers.mooncake_master", "10.0.0.5:50051")
    ('10.0.0.5', 50051)

    Raises:
        ConfigError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= _MAX_PORT):
        came = repr(address) if address else "none"
        raise ConfigError(f"{key}: expected HOST:PORT with a port from 1 to {_MAX_PORT}, got {came}")
    return host, int(port)
