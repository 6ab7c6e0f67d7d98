"""Divides the requests that an engine may have unfinished among the calls of several threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class RequestSlots:
    """Slots for unfinished requests, of which each call may acquire an equal share. Thread-safe.

        call a, alone      [a][a][a][a][a][a]
        call b begins      [a][a][a][a][a][b]     b waits until a request of a ends, and gets each further slot of a
        both               [a][a][a][b][b][b]     until both have their share

    A call that has a slot may continue without another one, and a call without slots waits for its first slot.

    Args:
        num_slots: maximum number of unfinished requests of all calls together.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_taken = 0
        self._num_calls = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def call(self) -> Iterator[CallSlots]:
        """Count a call inside a `with` block. At the end of the block, the slots of the call are released.

        Yields:
            The slots of the call, none at first.
        """
        with self._changed:
            self._num_calls += 1
        slots = CallSlots(self)
        try:
            yield slots
        finally:
            self.release(slots.num_taken)
            with self._changed:
                self._num_calls -= 1

    def take(self, num_own_slots: int) -> bool:
        """Acquire a slot for a call that has `num_own_slots` slots; see `CallSlots.take`."""
        with self._changed:
            while self._num_taken >= self._num_slots or num_own_slots >= max(1, self._num_slots // self._num_calls):
                if num_own_slots:
                    return False
                self._changed.wait()
            self._num_taken += 1
            return True

    def release(self, num_slots: int) -> None:
        """Release slots."""
        with self._changed:
            self._num_taken -= num_slots
            self._changed.notify(num_slots)


class CallSlots:
    """The slots of one call. For use by one thread.

    Args:
        slots: the slots of all calls.

    Attributes:
        num_taken: number of slots that the call has.
    """

    def __init__(self, slots: RequestSlots) -> None:
        self._slots = slots
        self.num_taken = 0

    def take(self) -> bool:
        """Acquire a slot. If the call has none and all are in use, wait until one is released.

        Returns:
            Whether a slot was acquired; if not, the call has its share, or all slots are in use.
        """
        is_taken = self._slots.take(self.num_taken)
        self.num_taken += is_taken
        return is_taken

    def release(self) -> None:
        """Release a slot."""
        self.num_taken -= 1
        self._slots.release(1)
