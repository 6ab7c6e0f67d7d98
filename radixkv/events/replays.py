"""Replays kept batches to readers over ZMQ that missed some."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from radixkv.events.published_batches import SEQUENCE_BYTES, Message, PublishedBatches

_LOG_PERIOD_S = 60.0

_logger = logging.getLogger(__name__)


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
