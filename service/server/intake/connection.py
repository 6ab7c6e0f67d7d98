"""Ends connections from the side of the server, which gRPC for Python can't."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Set
from urllib.parse import unquote

# gRPC listens for IPv4 on sockets of IPv6 too, which name their peers so; gRPC itself does not.
_MAPPED = "::ffff:"


def close_connections(peers: Set[str]) -> int:
    """Shut down the sockets of this process that lead to these peers. gRPC notices, and ends their calls.

    Args:
        peers: as gRPC names them: `ipv4:127.0.0.1:40000`, `ipv6:%5B::1%5D:40000`.

    Returns:
        How many there were. Complexity: O(open files).
    """
    wanted = {_address(peer) for peer in peers}
    num_closed = 0
    for name in os.listdir("/dev/fd"):
        # What is closed meanwhile, or is no connection, raises.
        with contextlib.suppress(OSError, ValueError), _duplicate(int(name)) as connection:
            host, port = connection.getpeername()[:2]
            if (host.removeprefix(_MAPPED), port) in wanted:
                connection.shutdown(socket.SHUT_RDWR)
                num_closed += 1
    return num_closed


def _duplicate(number: int) -> socket.socket:
    own = os.dup(number)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _address(peer: str) -> tuple[str, int]:
    """Return host and port of a peer.

    >>> _address("ipv6:%5B::1%5D:40000")
    ('::1', 40000)
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0
