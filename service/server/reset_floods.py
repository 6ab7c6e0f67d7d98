"""Detects connections that begin calls only to reset them: HTTP/2 rapid reset (CVE-2023-44487).

After a reset, the client may immediately begin another call, while the server still has to accept and end the first
one. So the limit on concurrent calls per connection does not bound this work.
"""

from __future__ import annotations

from collections import OrderedDict

# A connection is closed when its count reaches this number. Each early reset adds one, and each answered call subtracts
# one, but not below zero. For comparison, Envoy closes a connection that has reset half of 500 calls.
MAX_RESETS = 100
# A call that is reset later than this after it was accepted does not count; its deadline may have passed.
EARLY_S = 0.1
_MAX_CONNECTIONS = 4096  # maximum number of connections that are remembered


class ResetFloods:
    """Counts early resets per connection. Complexity: O(1) per call; O(1) memory."""

    def __init__(self) -> None:
        self._num_resets: OrderedDict[str, int] = OrderedDict()  # by connection, the one with the oldest reset first
        self._closed: OrderedDict[str, int] = OrderedDict()  # likewise, for connections that are or were closed

    def note_answer(self, peer: str) -> None:
        """Record that the server has answered a call of a connection."""
        num_resets = self._num_resets.get(peer, 0)
        if num_resets > 1:
            self._num_resets[peer] = num_resets - 1
        elif num_resets:
            del self._num_resets[peer]

    def note_reset(self, peer: str) -> bool:
        """Record that a connection has reset a call early.

        Returns:
            Whether the connection must now be closed. True only once per connection, until `forget`.
        """
        num_resets = self._num_resets.pop(peer, 0) + 1
        if peer in self._closed:
            return False
        if num_resets < MAX_RESETS:
            _remember(self._num_resets, peer, num_resets)
            return False
        _remember(self._closed, peer, num_resets)
        return True

    def is_closed(self, peer: str) -> bool:
        """Return whether a connection was closed or is being closed, so that its further calls need no response."""
        return peer in self._closed

    def forget(self, peer: str) -> bool:
        """Forget a connection that was closed a while ago, since its address may be used again.

        Returns:
            Whether the flood is over, that is, no other connection was closed recently.
        """
        self._closed.pop(peer, None)
        return not self._closed


def _remember(num_resets_by_peer: OrderedDict[str, int], peer: str, num_resets: int) -> None:
    num_resets_by_peer[peer] = num_resets
    if len(num_resets_by_peer) > _MAX_CONNECTIONS:
        num_resets_by_peer.popitem(last=False)
