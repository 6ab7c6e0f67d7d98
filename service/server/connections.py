"""Closes TCP connections of this process, which gRPC for Python cannot do.

At the end of a drain, `end_connections` closes the connections of a server that has sent its last response. gRPC's own
`Server.stop` cancels every call that arrives between its start and the moment when the client reads the GOAWAY frame,
and every call that no handler has accepted yet. The client sees CANCELLED, which no client retries (grpc/grpc issue
41785). When a TCP connection is closed, every call on it that has no status yet fails with UNAVAILABLE instead. gRPC
offers no way to do that, so this module finds the sockets by their port.

`close_connections` closes the connections of callers that do not read their responses, or that reset too many calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import stat
import struct
import sys
import termios
from collections.abc import Collection, Set
from urllib.parse import unquote

# Prefix of an IPv4 address on an IPv6 socket, which gRPC omits in the names of peers.
_IPV4_MAPPED_PREFIX = "::ffff:"
_CLOSE_POLL_S = 0.005  # between two checks whether all connections are closed
# A thread of gRPC that was accepting a connection when the listening socket was closed has finished after this time.
_LAST_ACCEPT_S = 0.1


async def end_connections(ports: Collection[int], timeout_s: float) -> None:
    """Refuse new connections to these ports of this process, and close the connections that are open.

        open ──▶ every byte acknowledged ──▶ FIN ──▶ closed by the client
                                                     (or here, after the timeout)

    A client reads everything that was sent before it sees the end of the connection. The server must already refuse all
    calls, and should be stopped afterwards. Does nothing on systems other than Linux.

    Args:
        ports: listening ports of gRPC servers in this process.
        timeout_s: seconds that clients have to read what was sent and to close their connections. Connections that are
            still open then are closed.
    """
    if sys.platform != "linux":
        return
    with contextlib.ExitStack() as stack:
        finder = _SocketFinder(ports, stack)
        unacknowledged: dict[int, socket.socket] = {}  # by the file descriptors of the duplicates
        awaiting_close: dict[int, socket.socket] = {}  # likewise; these have sent a FIN
        for original_fd, each in finder.new_sockets():
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _stop_listening(original_fd, each)
            else:
                unacknowledged[each.fileno()] = each
        poll = select.poll()
        start_s = asyncio.get_running_loop().time()
        while True:
            unacknowledged.update((each.fileno(), each) for _, each in finder.new_sockets())
            for fd in [fd for fd, each in unacknowledged.items() if _num_unacknowledged_bytes(each) == 0]:
                awaiting_close[fd] = unacknowledged.pop(fd)
                _shut(awaiting_close[fd], socket.SHUT_WR)
                poll.register(fd, 0)  # reports only that both sides have ended
            for fd, _ in poll.poll(0):
                poll.unregister(fd)
                del awaiting_close[fd]
            elapsed_s = asyncio.get_running_loop().time() - start_s
            if elapsed_s >= _LAST_ACCEPT_S and (elapsed_s >= timeout_s or not (unacknowledged or awaiting_close)):
                break
            await asyncio.sleep(_CLOSE_POLL_S)
        for each in (*unacknowledged.values(), *awaiting_close.values()):
            _shut(each, socket.SHUT_RDWR)


class _SocketFinder:
    """Finds the TCP sockets of this process that are bound to given ports.

    Args:
        ports: local ports.
        stack: closes the duplicates that `new_sockets` returns.
    """

    def __init__(self, ports: Collection[int], stack: contextlib.ExitStack) -> None:
        self._ports = ports
        self._stack = stack
        self._seen_inodes: set[int] = set()

    def new_sockets(self) -> list[tuple[int, socket.socket]]:
        """Return the file descriptor and a duplicate of each socket that was not found before.

        If the process runs out of file descriptors, some connections are not found; gRPC closes them.
        """
        sockets = []
        for fd, inode in _socket_fds():
            if inode in self._seen_inodes:
                continue
            # The socket was closed, its number was reused for another file, or no descriptor is left for the duplicate.
            with contextlib.suppress(OSError):
                each = _duplicate(fd)
                if os.fstat(each.fileno()).st_ino != inode:  # the number was reused for another socket
                    each.close()
                    continue
                self._seen_inodes.add(inode)
                is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
                if is_tcp and each.getsockname()[1] in self._ports:
                    sockets.append((fd, self._stack.enter_context(each)))
                else:
                    each.close()
        return sockets


def _socket_fds() -> list[tuple[int, int]]:
    """Return the file descriptors of this process that are sockets, with their inodes.

    The list is empty if the process has no descriptor left to read its own descriptors.
    """
    fds = []
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # the file was closed
                status = os.fstat(fd)
                if stat.S_ISSOCK(status.st_mode):
                    fds.append((fd, status.st_ino))
    return fds


def _stop_listening(fd: int, duplicate: socket.socket) -> None:
    """Close the listening socket of gRPC, and replace it by an idle one, to which no client connects.

    If gRPC accepted from a socket that does not listen, it would log an error.
    """
    try:
        with socket.socket(socket.AF_UNIX) as idle:
            idle.setblocking(False)
            idle.bind("")  # Linux picks a free name in the abstract namespace
            idle.listen(1)
            os.dup2(idle.fileno(), fd, inheritable=False)
        duplicate.close()
    except OSError:  # no file descriptor is left
        _shut(duplicate, socket.SHUT_RDWR)


def _shut(connection: socket.socket, directions: int) -> None:
    with contextlib.suppress(OSError):  # the client has ended the connection already
        connection.shutdown(directions)


def _num_unacknowledged_bytes(connection: socket.socket) -> int:
    """Return the number of written bytes that the peer has not acknowledged yet; 0 for a broken connection."""
    try:
        num_bytes: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    except OSError:
        return 0
    return num_bytes


def close_connections(peers: Set[str]) -> int:
    """Shut down the connections of this process to these peers. gRPC then ends the calls on them.

    Args:
        peers: as gRPC names them: `ipv4:127.0.0.1:40000`, `ipv6:%5B::1%5D:40000`.

    Returns:
        Number of connections that were shut down.

    Complexity: O(open files).
    """
    addresses = {_address(peer) for peer in peers}
    num_closed = 0
    for fd in os.listdir("/dev/fd"):
        # A file that was closed meanwhile, or is not a connection, raises.
        with contextlib.suppress(OSError, ValueError), _duplicate(int(fd)) as connection:
            host, port = connection.getpeername()[:2]
            if (host.removeprefix(_IPV4_MAPPED_PREFIX), port) in addresses:
                connection.shutdown(socket.SHUT_RDWR)
                num_closed += 1
    return num_closed


def _duplicate(fd: int) -> socket.socket:
    duplicate = os.dup(fd)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _address(peer: str) -> tuple[str, int]:
    """Return host and port of a peer.

    >>> _address("ipv6:%5B::1%5D:40000")
    ('::1', 40000)
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0
