"""One connection of a reader over ZMQ: its socket, its protocol, and its reader of the log."""

from __future__ import annotations

import contextlib
import selectors
import socket

from radixkv.events.log_readers import LogReader
from radixkv.events.zmtp import READ_BYTES, ZmtpConnection, ZmtpError

HANDSHAKE_S = 10.0
STALLED_S = 30.0

# TCP options that detect machines that have vanished: seconds without traffic before the first probe, seconds between
# probes, and the number of unanswered probes after which the connection is closed.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class PeerConnection:
    """Serves one peer in small units of work, so that many peers can take turns.

    It holds at most one message in each direction. While it sends, it does not read.

    Args:
        connection: an accepted socket, which is owned by this object from then on.
        protocol: the protocol of this connection.
        reader: handles the messages of the peer.
        now_s: monotonic time in seconds.

    Attributes:
        last_progress_s: when the connection was accepted, a message of the log was begun, or something was sent,
            whichever was last.
    """

    def __init__(self, connection: socket.socket, protocol: ZmtpConnection, reader: LogReader, now_s: float) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.last_progress_s = now_s
        self._is_readable = False
        self._connection = connection
        self._protocol = protocol
        self._reader = reader
        self._unsent: list[memoryview] = []

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._connection.fileno()

    def note(self, events: int) -> None:
        """Record the events of the socket that a selector has reported."""
        self._is_readable = self._is_readable or bool(events & selectors.EVENT_READ)

    @property
    def is_open(self) -> bool:
        """Whether the handshake has finished."""
        return self._protocol.is_open

    @property
    def has_unsent(self) -> bool:
        """Whether a message or a reply is not sent completely yet."""
        return bool(self._unsent)

    @property
    def waits_for(self) -> int:
        """The events of the socket for which a selector must wait."""
        return selectors.EVENT_WRITE if self._unsent or self._reader.is_busy else selectors.EVENT_READ

    def is_late(self, now_s: float) -> bool:
        """Whether the peer takes too long for its handshake, or accepts nothing."""
        if self._unsent:
            return now_s > self.last_progress_s + STALLED_S
        return not self.is_open and now_s > self.last_progress_s + HANDSHAKE_S

    def work(self, now_s: float) -> bool:
        """Do one unit of work: send a message or what the socket takes of it, or receive bytes, or read one frame.

        Returns:
            Whether there was something to do.

        Raises:
            ZmtpError, OSError: the connection must be closed.
        """
        if self._unsent:
            return self._send(now_s)
        if self._protocol.replies:
            self._unsent = [memoryview(self._protocol.replies)]
            self._protocol.replies = b""
            return self._send(now_s)
        if self.is_open and (message := self._reader.next_message()) is not None:
            self._unsent = [memoryview(piece) for piece in self._protocol.encode(message) if piece]
            self.last_progress_s = now_s
            self._send(now_s)
            return True
        message_or_progress = self._protocol.read()
        if message_or_progress is False:
            return self._is_readable and self._receive()
        if message_or_progress is not True:
            self._reader.receive(message_or_progress)
        return True

    def close(self, reply: bytes = b"") -> None:
        """Close the connection. `reply` is sent first if the socket accepts it at once and no message is half sent."""
        if reply and not self._unsent:
            with contextlib.suppress(OSError):
                self._connection.send(reply)
        self._connection.close()

    def _receive(self) -> bool:
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            self._is_readable = False
            return False
        if not data:
            raise ZmtpError("the peer has disconnected")
        self._is_readable = len(data) == READ_BYTES
        self._protocol.feed(data)
        return True

    def _send(self, now_s: float) -> bool:
        try:
            num_sent = self._connection.sendmsg(self._unsent)
        except BlockingIOError:
            return False
        while self._unsent and num_sent >= len(self._unsent[0]):
            num_sent -= len(self._unsent.pop(0))
        if self._unsent:
            self._unsent[0] = self._unsent[0][num_sent:]
        self.last_progress_s = now_s
        return True
