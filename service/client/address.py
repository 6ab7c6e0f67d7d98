"""Addresses of servers, `HOST:PORT`, and whether they are on this machine."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from typing import Any

ChannelOptions = Sequence[tuple[str, Any]]

_GRPC_SCHEMES = ("unix:", "dns:", "ipv4:", "ipv6:", "xds:")
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # in the order in which gRPC reads them
_NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")


def require_address(address: str) -> str:
    """Check an address. Without this check, gRPC would use port 443 if the port is missing, and reduce larger ports
    modulo 65536. An address with one of gRPC's schemes, such as `unix:` or `dns:`, is not checked.

    Returns:
        The address.

    Raises:
        TypeError: it is not a string.
        ValueError: it has no port from 1 to 65535.
    """
    if not isinstance(address, str):
        raise TypeError(f"address: expected HOST:PORT, got {address!r}")
    if address.startswith(_GRPC_SCHEMES):
        return address
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"address: expected HOST:PORT with a port from 1 to 65535, got {address!r}")
    return address


def host_of(address: str) -> str:
    """Return the host of an address with a port.

    >>> [host_of(each) for each in ("kv-1:50051", "[::1]:1", "dns:///kv-1:50051")]
    ['kv-1', '::1', 'kv-1']
    """
    for scheme in ("ipv4:", "ipv6:", "dns:", "xds:"):
        address = address.removeprefix(scheme)
    return address.rpartition("/")[2].rpartition(":")[0].strip("[]")


def is_on_this_machine(address: str) -> bool:
    """Return whether traffic to this address stays on this machine.

    >>> [is_on_this_machine(each) for each in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/s", "10.0.0.1:1")]
    [True, True, True, True, False]
    """
    return address.startswith("unix:") or is_loopback(host_of(address))


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached only from this machine.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "", "example.org")]
    [True, True, True, False, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_variable(address: str, options: ChannelOptions = ()) -> str:
    """Return the environment variable that names the HTTP proxy gRPC connects through; empty if it uses none.

    Args:
        address: address of the server.
        options: options of the channel. `grpc.enable_http_proxy` says whether a proxy may be used; by default it may,
            unless the server is on this machine.
    """
    if not dict(options).get("grpc.enable_http_proxy", not is_on_this_machine(address)):
        return ""
    variable = next((name for name in _PROXY_VARIABLES if os.environ.get(name)), "")
    excluded_hosts = next((os.environ[name] for name in _NO_PROXY_VARIABLES if os.environ.get(name)), "")
    host = host_of(address)
    if any(host.endswith(each.strip()) for each in excluded_hosts.split(",") if each.strip()):
        return ""
    return variable
