"""A port for readers over ZMQ: it accepts connections, and serves them in turns."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable

from radixkv.events.log_readers import LogReader
from radixkv.events.peer_connection import PeerConnection
from radixkv.events.zmq_address import ZmqAddress, end_listening
from radixkv.events.zmtp import Security, ZmtpConnection, ZmtpError

MAX_PEERS = 256

# Limits of one turn: units of work, and accepted connections. A unit is a message, a frame, or one call of the socket,
# and takes about 10 us.
_MAX_UNITS = 64
_MAX_ACCEPTED = 8


class ZmqPort:
    """Serves the peers of one address. Nothing here blocks.

    Peers take turns with one unit of work each. Beyond `MAX_PEERS` connections, the oldest connection without a
    finished handshake is closed, or the new one if all have finished it.

    Args:
        address: the address to bind. `close` releases it.
        make_security: creates the security mechanism of a new connection.
        make_reader: creates the reader of the log for a new connection.

    Attributes:
        endpoint: the address, with the port that was bound.

    Raises:
        ConfigError: the address can't be bound; the message names the key.
    """

    def __init__(
        self,
        address: ZmqAddress,
        make_security: Callable[[], Security],
        make_reader: Callable[[], LogReader],
    ) -> None:
        self._listener, self.endpoint = address.listen()
        self._make_security = make_security
        self._make_reader = make_reader
        self._selector: selectors.BaseSelector
        self._peers: deque[PeerConnection] = deque()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register all sockets with a selector. The data of each key is a function to call with the events."""
        self._selector = selector
        selector.register(self._listener, selectors.EVENT_READ, lambda _: None)

    @property
    def has_peers(self) -> bool:
        """Whether there is any connection."""
        return bool(self._peers)

    @property
    def has_unsent(self) -> bool:
        """Whether a message or a reply to any peer is not sent completely yet."""
        return any(peer.has_unsent for peer in self._peers)

    def accept(self, now_s: float) -> None:
        """Accept the next connections, a few at once."""
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no connection waits, or there are too many open files
                return
            if len(self._peers) >= MAX_PEERS and not self._close_oldest_unfinished():
                connection.close()
                continue
            protocol = ZmtpConnection(self._make_security())
            try:
                peer = PeerConnection(connection, protocol, self._make_reader(), now_s)
            except OSError:  # the peer has already disconnected
                connection.close()
                continue
            self._selector.register(peer, peer.waits_for, peer.note)
            self._peers.append(peer)

    def serve(self, now_s: float) -> bool:
        """Do the work of one turn. Return whether more work may be left."""
        num_units_left, num_idle_peers = _MAX_UNITS, 0
        while num_units_left and num_idle_peers < len(self._peers):
            peer = self._peers[0]
            try:
                has_worked = peer.work(now_s)
            except (ZmtpError, OSError) as error:
                self._close_peer(peer, error.reply if isinstance(error, ZmtpError) else b"")
                num_units_left -= 1
                continue
            self._peers.rotate(-1)
            num_idle_peers = 0 if has_worked else num_idle_peers + 1
            num_units_left -= has_worked
            if peer.waits_for != self._selector.get_key(peer).events:
                self._selector.modify(peer, peer.waits_for, peer.note)
        return num_units_left == 0

    def close_late(self, now_s: float) -> None:
        """Close the connections of peers that take too long."""
        for peer in [peer for peer in self._peers if peer.is_late(now_s)]:
            self._close_peer(peer)

    def close(self) -> None:
        """Close all connections, and release the address."""
        while self._peers:
            self._peers.popleft().close()
        end_listening(self._listener)

    def _close_oldest_unfinished(self) -> bool:
        """Close the oldest connection whose handshake has not finished. Returns whether there was one."""
        unfinished = min(
            (peer for peer in self._peers if not peer.is_open), key=lambda peer: peer.last_progress_s, default=None
        )
        if unfinished is None:
            return False
        self._close_peer(unfinished)
        return True

    def _close_peer(self, peer: PeerConnection, reply: bytes = b"") -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer)
        peer.close(reply)
