"""What peers read from the event log over ZMQ: subscriptions and replays."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from radixkv.events.published_batches import SEQUENCE_BYTES, Message, PublishedBatches
from radixkv.events.zmtp import ZmtpError

_SUBSCRIBE, _CANCEL = 1, 0
_LOG_PERIOD_S = 60.0

_logger = logging.getLogger(__name__)


class LogReader(Protocol):
    """Receives the messages of a peer, and returns messages from the log for it."""

    @property
    def is_busy(self) -> bool:
        """Whether the next message of the peer must wait."""
        ...

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take a message of the peer. Raises ZmtpError if the connection must be closed."""
        ...

    def next_message(self) -> Sequence[bytes] | None:
        """Return the next message for the peer; None if there is none."""
        ...


class SubscriptionReader:
    """Reads the log from the moment of its first subscription on.

        subscription   [1 and a prefix of the topic], or [0 and the prefix] to cancel it
        messages       [topic, sequence, payload]

    Messages are not queued: a slow subscriber falls behind in the log. If its next batch has been dropped, it continues
    with the oldest batch that is kept. Subscriptions to other topics are ignored, so the memory per subscriber is
    bounded.

    Args:
        batches: the published batches.
    """

    is_busy = False

    def __init__(self, batches: PublishedBatches) -> None:
        self._batches = batches
        self._last_number: int | None = None  # of the batch before the next one to send; None without a subscription
        self._subscriptions: Counter[int] = Counter()  # by the length of the prefix

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take a message of the subscriber.

        Raises:
            ZmtpError: it is not a subscription.
        """
        if len(frames) != 1 or not frames[0] or frames[0][0] not in (_SUBSCRIBE, _CANCEL):
            raise ZmtpError("a subscriber sent a message that is not a subscription")
        prefix = frames[0][1:]
        if not self._batches.topic.startswith(prefix):
            return
        if frames[0][0] == _SUBSCRIBE:
            self._subscriptions[len(prefix)] += 1
            if self._last_number is None:
                self._last_number = self._batches.last
        elif self._subscriptions[len(prefix)] > 0:
            self._subscriptions[len(prefix)] -= 1
            if not self._subscriptions.total():
                self._last_number = None

    def next_message(self) -> Message | None:
        """Return the next message to send; None if there is none yet."""
        if self._last_number is None:
            return None
        next_batch = self._batches.next_after(self._last_number)
        if next_batch is None:
            return None
        self._last_number, message = next_batch
        return message


class ReplayReader:
    """Answers the replay requests of one reader, one after the other.

        request   [b"", first sequence number]
        responses [b"", topic, sequence, payload] ..., then [b"", topic, -1, b""]

    Requests are not read during a replay, so they cannot accumulate.

    Args:
        batches: the published batches.
        note_malformed: is called for each malformed request, which is not answered.
    """

    def __init__(self, batches: PublishedBatches, note_malformed: Callable[[], None]) -> None:
        self._batches = batches
        self._note_malformed = note_malformed
        self._last_number: int | None = None  # of the batch before the next one to send; None without a replay

    @property
    def is_busy(self) -> bool:
        """Whether a replay is in progress."""
        return self._last_number is not None

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take a request. The reader must not be busy."""
        if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_BYTES:
            self._note_malformed()
        else:
            self._last_number = self._batches.number_before(frames[1])

    def next_message(self) -> tuple[bytes, *Message] | None:
        """Return the next message of the replay; None if no replay is in progress."""
        if self._last_number is None:
            return None
        next_batch = self._batches.next_after(self._last_number)
        if next_batch is None:
            self._last_number = None
            return b"", *self._batches.end
        self._last_number, message = next_batch
        return b"", *message


class MalformedRequests:
    """Counts malformed requests, and logs them at most once per minute."""

    def __init__(self) -> None:
        self._num_unlogged = 0
        self._next_log_s = 0.0

    def note(self) -> None:
        """Count a request."""
        self._num_unlogged += 1
        now_s = time.monotonic()
        if now_s >= self._next_log_s:
            _logger.warning(
                "%d malformed requests for replays were not answered: expected the frames b'' and a sequence number of "
                "eight bytes; further ones are logged once per %g s",
                self._num_unlogged,
                _LOG_PERIOD_S,
            )
            self._num_unlogged = 0
            self._next_log_s = now_s + _LOG_PERIOD_S
