"""Keeps Ray Serve's own ports of a fleet on one machine off the network."""

from __future__ import annotations

from typing import Any

_ALL, _LOOPBACK = "[::]:", "127.0.0.1:"


def listen_on_loopback() -> None:
    """Have the gRPC server that Ray Serve gives each of its processes listen on loopback.

    Ray calls it at the start of each process of a fleet on one machine. The rest of Ray listens where its node is; this
    one server listens on all addresses, in Ray 2.60, and has no setting for it.
    """
    from ray.serve._private import replica

    add_port: Any = replica.add_port_to_grpc_server

    def add_local_port(server: Any, address: str) -> Any:
        return add_port(server, address.replace(_ALL, _LOOPBACK))

    replica.add_port_to_grpc_server = add_local_port
