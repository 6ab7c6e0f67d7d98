"""The addresses of event ports: `tcp://HOST:PORT` and `ipc://PATH`."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from typing import Any

from radixkv.errors import ConfigError

_ANYWHERE = "0.0.0.0"
_MAX_PORT = 65_535
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ZmqAddress:
    """A resolved address. `is_local` and `listen` use the same resolution.

    Attributes:
        key: the configuration key, for error messages.
        endpoint: the configured endpoint.
        family: address family of the socket.
        socket_address: the argument of `socket.bind`: a path, or a tuple that starts with host and port.
        is_local: whether only processes on this machine can connect.
    """

    key: str
    endpoint: str
    family: socket.AddressFamily
    socket_address: Any
    is_local: bool

    @classmethod
    def of(cls, key: str, endpoint: str) -> ZmqAddress:
        """Resolve an endpoint of the configuration. `*` as host means all interfaces, and `*` as port a free port.

        Raises:
            ConfigError: `endpoint` is not an address; the message names the key.
        """
        scheme, _, location = endpoint.partition("://")
        try:
            if scheme == "ipc" and location:
                is_abstract = location.startswith("@")  # a name in Linux's abstract namespace instead of a path
                path = "\0" + location[1:] if is_abstract else location
                return cls(key, endpoint, socket.AF_UNIX, path, is_local=True)
            host, _, port = location.rpartition(":")
            if scheme != "tcp" or not host or not (port == "*" or (port.isascii() and port.isdigit())):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            port_number = 0 if port == "*" else int(port)
            if port_number > _MAX_PORT:
                raise OSError(errno.EINVAL, f"a port is at most {_MAX_PORT}")
            host = _ANYWHERE if host == "*" else host.removeprefix("[").removesuffix("]")
            resolved = socket.getaddrinfo(host, port_number, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, ValueError) as error:
            raise _unusable(key, endpoint, error) from error
        # An IPv4 address if there is one, as in libzmq's clients.
        family, _, _, _, socket_address = min(resolved, key=lambda each: each[0] != socket.AF_INET)
        is_local = ipaddress.ip_address(str(socket_address[0]).partition("%")[0]).is_loopback
        return cls(key, endpoint, family, socket_address, is_local)

    def listen(self) -> tuple[socket.socket, str]:
        """Bind the address.

        Returns:
            A listening socket that does not block, and its endpoint with the port that was bound.

        Raises:
            ConfigError: the address can't be bound; the message names the key.
        """
        listener = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            if self.family == socket.AF_UNIX:
                _remove_stale(self.socket_address)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(self.socket_address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise _unusable(self.key, self.endpoint, error) from error
        listener.setblocking(False)
        return listener, self._endpoint_of(listener)

    def _endpoint_of(self, listener: socket.socket) -> str:
        if self.family == socket.AF_UNIX:
            return self.endpoint
        host, port = listener.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if self.family == socket.AF_INET6 else f"tcp://{host}:{port}"


def end_listening(listener: socket.socket) -> None:
    """Close a listening socket, and remove its file if it has one."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    listener.close()
    if isinstance(path, str) and path:  # an abstract name is bytes
        with contextlib.suppress(OSError):
            os.unlink(path)


def _remove_stale(path: str) -> None:
    """Remove the file of a socket that no process listens on any more, as after a kill."""
    if path.startswith("\0"):
        return
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                is_stale = probe.connect_ex(path) == errno.ECONNREFUSED
            if is_stale:
                os.unlink(path)


def _unusable(key: str, endpoint: str, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(
        f"events.{key}: expected a ZMQ address that can be bound, such as tcp://127.0.0.1:5557, got "
        f"{endpoint!r}: {reason}"
    )
