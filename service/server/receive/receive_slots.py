"""Slots for messages that are being received, with fair queues for the calls that wait for one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from radixkv.errors import DeadlinePassed, QueueFull, RadixKVError
from radixkv.service.server.receive.grpc_options import WINDOW_BYTES

# While other calls wait for a slot, a message may take this long, so that slow senders cannot occupy the slots.
_GRACE_S = 0.25
_RETRY_S = 1.0
_MAX_REMEMBERED_CONNECTIONS = 16_384


class ReceiveSlots:
    """Bounds how many messages are received at once, separately for senders of small and of large messages.

    So a sender of small messages does not wait behind connections whose last message was large or did not arrive. The
    size of a message is known only after it was received, so each connection is classified by its last message: if that
    message arrived completely and was no larger than one flow-control window, the next one uses the slots for small
    messages. New connections use the slots for large messages, so that reconnecting gains nothing. For use on one event
    loop.

    Args:
        num_slots: messages that are received at once, at least 2; half of them in each class. An odd slot is for small
            messages.
        max_waiting: calls that may wait for a slot, in each class.
        timeout_s: seconds that receiving a message may take.
    """

    def __init__(self, num_slots: int, max_waiting: int, timeout_s: float) -> None:
        self._small = SlotQueue(num_slots - num_slots // 2, max_waiting, timeout_s)
        self._large = SlotQueue(num_slots // 2, max_waiting, timeout_s)
        self._small_senders: dict[str, None] = {}  # connections, least recently used first

    async def receive(self, connection: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Wait for a slot and read a message. Arguments and exceptions are those of `SlotQueue.receive`."""
        queue = self._small if connection in self._small_senders else self._large
        try:
            data = await queue.receive(connection, read)
        finally:  # also if the client cancels the call before the message has arrived
            self._small_senders.pop(connection, None)
        is_small = not isinstance(data, bytes) or len(data) <= WINDOW_BYTES  # gRPC's EOF is not bytes
        if is_small:
            self._small_senders[connection] = None
            if len(self._small_senders) > _MAX_REMEMBERED_CONNECTIONS:
                del self._small_senders[next(iter(self._small_senders))]
        return data


class SlotQueue:
    """A fixed number of slots, and one queue per connection of the calls that wait for a slot.

        call ─▶ waiting, one queue per connection ─▶ receiving, one slot per call ─▶ received
                   │ too many: the last of the longest queue   │ too slow
                   ▼                                           ▼
                refused                                     refused

    Free slots go to connections in turn (round robin). A call without a slot is not read, so gRPC buffers at most one
    flow-control window of its message. For use on one event loop.

    Args:
        num_slots: messages that are received at once.
        max_waiting: calls that may wait for a slot.
        timeout_s: seconds that receiving a message may take.
    """

    def __init__(self, num_slots: int, max_waiting: int, timeout_s: float) -> None:
        self._num_free = num_slots
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # by connection, in the order of their turns
        self._num_waiting = 0
        self._receiving: dict[asyncio.Task[object], float] = {}  # with their start times, the oldest first
        self._expired: set[asyncio.Task[object]] = set()
        self._next_check: asyncio.TimerHandle | None = None  # the next call of `_cancel_late`

    async def receive(self, connection: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Wait for a slot and read a message.

        Args:
            connection: the name of the connection that the message arrives on.
            read: reads the message.

        Raises:
            QueueFull: too many calls wait, and no connection has more of them than this one; or the message was slow
                while calls waited.
            DeadlinePassed: the message did not arrive within `timeout_s`.
        """
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait_for_slot(connection)
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call as a task"
        start_s = self._receiving[task] = loop.time()
        if self._next_check is None:
            self._next_check = loop.call_at(start_s + self._timeout_s, self._cancel_late)
        try:
            return await read()
        except asyncio.CancelledError:
            if task not in self._expired or task.uncancel() > 0:
                raise
            raise self._timeout_error(loop.time() - start_s) from None
        finally:
            del self._receiving[task]
            self._expired.discard(task)
            self._pass_on_slot()

    def _timeout_error(self, elapsed_s: float) -> RadixKVError:
        if elapsed_s < self._timeout_s:
            return QueueFull(
                f"message: only a part of it arrived within {_GRACE_S} s, the limit while other calls wait",
                retry_after_s=_RETRY_S,
            )
        return DeadlinePassed(
            f"message: only a part of it arrived within {self._timeout_s:g} s (`server.receive_timeout_s`)"
        )

    async def _wait_for_slot(self, connection: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(connection, deque()).append(turn)
        self._num_waiting += 1
        if self._num_waiting > self._max_waiting:
            self._refuse_one()
        self._check_soon()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on_slot()  # the slot was granted, but the call was cancelled
            else:
                self._remove(connection, turn)
            raise

    def _pass_on_slot(self) -> None:
        """Grant a slot to the connection whose turn it is. If no call waits, the slot becomes free."""
        while self._queues:
            connection = next(iter(self._queues))
            queue = self._queues.pop(connection)
            turn = queue.popleft()
            self._num_waiting -= 1
            if queue:
                self._queues[connection] = queue  # its next turn comes after those of the other connections
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _refuse_one(self) -> None:
        """Refuse the last call of the connection with the most waiting calls."""
        connection, queue = max(self._queues.items(), key=lambda item: len(item[1]))
        turn = queue[-1]
        self._remove(connection, turn)
        turn.set_exception(
            QueueFull(
                f"service: more than {self._max_waiting} calls are waiting to be received",
                retry_after_s=_RETRY_S,
            )
        )

    def _remove(self, connection: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(connection)
        if queue is None or turn not in queue:
            return
        queue.remove(turn)
        self._num_waiting -= 1
        if not queue:
            del self._queues[connection]

    def _check_soon(self) -> None:
        """Look for slow messages every quarter of the grace period while calls wait."""
        loop = asyncio.get_running_loop()
        soon_s = loop.time() + _GRACE_S / 4
        if self._next_check is None or self._next_check.when() > soon_s:
            if self._next_check is not None:
                self._next_check.cancel()
            self._next_check = loop.call_at(soon_s, self._cancel_late)

    def _cancel_late(self) -> None:
        """Cancel messages that exceed the timeout and, per waiting call, one message that exceeds the grace period."""
        self._next_check = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        num_to_free = self._num_waiting
        for task, start_s in self._receiving.items():
            is_slow = num_to_free > 0 and now_s - start_s >= _GRACE_S
            if task not in self._expired and (is_slow or now_s - start_s >= self._timeout_s):
                self._expired.add(task)
                task.cancel()
                num_to_free -= 1
        if self._num_waiting:
            self._check_soon()
        elif len(self._receiving) > len(self._expired):
            oldest_s = next(start_s for task, start_s in self._receiving.items() if task not in self._expired)
            self._next_check = loop.call_at(oldest_s + self._timeout_s, self._cancel_late)
