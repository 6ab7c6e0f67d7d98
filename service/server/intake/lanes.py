"""Places for connections that send small messages, and others for all the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from radixkv.errors import RadixKVError
from radixkv.service.server.intake.bounds import WINDOW_BYTES
from radixkv.service.server.intake.places import Places

_MOST_REMEMBERED = 16_384


class Lanes:
    """Keeps those who send small messages from waiting behind large ones, and behind those that do not come.

    The size of a message is known only when it has come. So each connection is taken for what it did last: if that
    message came whole and was no larger than a window of gRPC, its next one waits among the small ones. New connections
    wait among the large ones, so that none gains by being new. To be used on the event loop alone.

    Args:
        num_places: messages that are received at once, at least 2; half of them in each lane.
        num_waiting: calls that may wait for a place, in each lane.
        timeout_s: seconds that a message may take.
    """

    def __init__(self, num_places: int, num_waiting: int, timeout_s: float) -> None:
        self._small = Places(num_places - num_places // 2, num_waiting, timeout_s)
        self._large = Places(num_places // 2, num_waiting, timeout_s)
        self._with_small: dict[str, None] = {}  # connections; the first one is forgotten first

    async def receive(self, connection: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Wait for a place and read a message; arguments and errors as for `Places.receive`."""
        lane = self._small if connection in self._with_small else self._large
        try:
            data = await lane.receive(connection, read)
        except RadixKVError:
            self._note(connection, is_small=False)
            raise
        self._note(connection, is_small=not (isinstance(data, bytes) and len(data) > WINDOW_BYTES))
        return data

    def _note(self, connection: str, *, is_small: bool) -> None:
        self._with_small.pop(connection, None)
        if is_small:
            self._with_small[connection] = None
            if len(self._with_small) > _MOST_REMEMBERED:
                del self._with_small[next(iter(self._with_small))]
