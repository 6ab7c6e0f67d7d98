"""Addresses that the service listens on, and checks that they are free."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from radixkv.config import ServerConfig
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    import grpc.aio

    from radixkv.service.server.auth.tls import Tls


def host_port(host: str, port: int) -> str:
    """Return `HOST:PORT`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_error(key: str, host: str, port: int) -> ConfigError:
    """Return the error for an address that cannot be bound; `key` is the port's key in the configuration."""
    return ConfigError(f"server.host, {key}: expected a free address of this machine, got {host_port(host, port)}")


def bind_port(server: grpc.aio.Server, host: str, key: str, port: int, tls: Tls | None) -> int:
    """Bind a port of a gRPC server, and return its number.

    Args:
        server: the server, not started yet.
        host: the address to listen on.
        key: the port's key in the configuration, for the error.
        port: the port; 0 for any free port.
        tls: the TLS of the port; None for plain text.

    Raises:
        ConfigError: the address cannot be bound.
    """
    address = host_port(host, port)
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, tls.grpc_credentials()))
    except RuntimeError as error:
        raise bind_error(key, host, port) from error


def require_free(config: ServerConfig) -> None:
    """Refuse addresses that cannot be bound, and a port that is configured twice, before a model is loaded.

    Raises:
        ConfigError: the message names the port's key.
    """
    ports = {
        "server.port": config.port,
        "server.metrics_port": config.metrics_port,
        "server.http_port": config.http_port,
        "server.admin_port": config.admin_port,
    }
    key_of: dict[int, str] = {}
    for key, port in ports.items():
        if port:  # 0 means any free port
            first_key = key_of.setdefault(port, key)
            if first_key != key:
                raise ConfigError(f"{key}: expected another port than {first_key}, got {port} for both")
            try:
                _try_to_bind(config.host, port)
            except (OSError, UnicodeError) as error:
                raise bind_error(key, config.host, port) from error


def _try_to_bind(host: str, port: int) -> None:
    """Bind every address of a host name for a moment. Raises if one is in use, or if none can be bound."""
    errors = []
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, address in addresses:
        try:
            socket.create_server(address[:2], family=family).close()
        except OSError as error:
            errors.append(error)
    for each in errors:
        if each.errno == errno.EADDRINUSE or len(errors) == len(addresses):
            raise each
