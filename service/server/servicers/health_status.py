"""The health status of a server and its services."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class HealthStatus:
    """The health status of a server and of each of its services. For use on one event loop.

    Attributes:
        names: names of the services; the empty name means the server itself.
        is_serving: whether the server and its services accept requests.
        changed: set when `names` or `is_serving` changes, and then replaced by a new event.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.is_serving = False
        self.changed = asyncio.Event()
        self._is_shutting_down = False

    def set(self, names: Iterable[str], *, is_serving: bool) -> None:
        """Set the status of these services and of the server; after `enter_graceful_shutdown` it stays NOT_SERVING."""
        names = frozenset(("", *names))
        is_serving = is_serving and not self._is_shutting_down
        if (names, is_serving) != (self.names, self.is_serving):
            self.names = names
            self.is_serving = is_serving
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()

    def enter_graceful_shutdown(self) -> None:
        """Report NOT_SERVING from now on."""
        self._is_shutting_down = True
        self.set(self.names, is_serving=False)
