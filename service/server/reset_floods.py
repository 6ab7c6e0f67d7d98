"""Recognizes connections that begin calls only to reset them: HTTP/2 rapid reset (CVE-2023-44487).

A reset frees its stream for the client at once, while the server has yet to take up and end the call, so the limit of
concurrent calls per connection does not bound this work.
"""

from __future__ import annotations

from collections import OrderedDict

# A connection is closed when it has reset this many calls more than it has let the server answer. Envoy closes one that
# has reset half of 500.
MAX_RESETS = 100

# A call that was taken up for longer counts as abandoned, as by a deadline of the client, and not as reset.
EARLY_S = 0.1

_MAX_CONNECTIONS = 4096  # that are remembered


class ResetFloods:
    """Counts early resets per connection. Complexity: O(1) per call; O(1) memory."""

    def __init__(self) -> None:
        self._num_resets: OrderedDict[str, int] = OrderedDict()  # by connection, the one with the oldest reset first
        self._closed: OrderedDict[str, int] = OrderedDict()

    def note_answer(self, peer: str) -> None:
        """Record that the server has answered a call of a connection."""
        number = self._num_resets.get(peer, 0)
        if number > 1:
            self._num_resets[peer] = number - 1
        elif number:
            del self._num_resets[peer]

    def note_reset(self, peer: str) -> bool:
        """Record that a connection has reset a call early.

        Returns:
            Whether the connection must be closed, which is true once.
        """
        number = self._num_resets.pop(peer, 0) + 1
        if peer in self._closed:
            return False
        if number < MAX_RESETS:
            _remember(self._num_resets, peer, number)
            return False
        _remember(self._closed, peer, number)
        return True

    def is_closed(self, peer: str) -> bool:
        """Whether a connection must be closed, or was. Its further calls need no answer."""
        return peer in self._closed

    def forget(self, peer: str) -> bool:
        """Forget a connection that was closed a while ago, since its address may be used again.

        Returns:
            Whether the flood is over: no other connection was closed lately.
        """
        self._closed.pop(peer, None)
        return not self._closed


def _remember(known: OrderedDict[str, int], peer: str, value: int) -> None:
    known[peer] = value
    if len(known) > _MAX_CONNECTIONS:
        known.popitem(last=False)
