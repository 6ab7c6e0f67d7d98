"""Lets a benchmark report what it has measured when it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interruption:
    """Ends a measurement early on SIGINT or SIGTERM.

    The first signal sets `event` and restores the previous handlers, so that a second signal can end the process.

    Attributes:
        signal_number: the first signal that arrived; None if none did.
        event: set when the first signal arrives.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.event = asyncio.Event()

    @property
    def name(self) -> str | None:
        """Name of the signal that arrived, such as SIGINT; None if none did."""
        return None if self.signal_number is None else signal.Signals(self.signal_number).name

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle both signals inside a `with` statement. Must be called in an event loop of the main thread."""
        loop = asyncio.get_running_loop()
        previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.signal_number = number
            loop.call_soon_threadsafe(self.event.set)
            restore()

        for number in previous_handlers:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            restore()
