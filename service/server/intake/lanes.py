"""Places for small messages, and others for large ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from radixkv.errors import RadixKVError
from radixkv.service.server.intake.bounds import WINDOW_BYTES
from radixkv.service.server.intake.places import Places

_MOST_REMEMBERED = 4096


class Lanes:
    """Keeps those who send small messages from waiting behind those who send large ones.

    The size of a message is known only when it has come. So each connection is taken for what it did last: if that
    message was larger than a window of gRPC, or did not come whole, its next one waits among the large ones. To be used
    on the event loop alone.

    Args:
        num_places: messages that are received at once, at least 2; half of them in each lane.
        num_waiting: calls that may wait for a place, in each lane.
        timeout_s: seconds that a message may take.
    """

    def __init__(self, num_places: int, num_waiting: int, timeout_s: float) -> None:
        self._small = Places(num_places - num_places // 2, num_waiting, timeout_s)
        self._large = Places(num_places // 2, num_waiting, timeout_s)
        self._with_large: dict[str, None] = {}  # connections; the first one is forgotten first

    async def receive(self, connection: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Wait for a place and read a message; arguments and errors as for `Places.receive`."""
        lane = self._large if connection in self._with_large else self._small
        try:
            data = await lane.receive(connection, read)
        except RadixKVError:
            self._note(connection, is_large=True)
            raise
        self._note(connection, is_large=isinstance(data, bytes) and len(data) > WINDOW_BYTES)
        return data

    def _note(self, connection: str, *, is_large: bool) -> None:
        self._with_large.pop(connection, None)
        if is_large:
            self._with_large[connection] = None
            if len(self._with_large) > _MOST_REMEMBERED:
                del self._with_large[next(iter(self._with_large))]
