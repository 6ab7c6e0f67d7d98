"""The event log as messages for readers over ZMQ."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from radixkv.api.events import EventBatch
from radixkv.events.event_log import EventLog

SEQUENCE_BYTES = 8
_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_MAX_PAYLOADS = 32  # cached payloads: 6 MB if a step stores 2,048 blocks of 16 tokens

Message = tuple[bytes, bytes, bytes]


class PublishedBatches:
    """Writes batches as `(topic, sequence, payload)`. Sequence numbers begin with 0 at each start of the process.

    Args:
        log: the batches.
        topic: the topic of all messages.
        payload: serializes a batch.

    Attributes:
        topic: the argument `topic`.
        end: the message after the last batch of a replay.
    """

    def __init__(self, log: EventLog, topic: bytes, payload: Callable[[EventBatch], bytes]) -> None:
        self.topic = topic
        self.end: Message = (topic, _END, b"")
        self._log = log
        self._payload = lru_cache(maxsize=_MAX_PAYLOADS)(payload)

    @property
    def last(self) -> int:
        """Number of the last batch."""
        return self._log.last

    @property
    def before_oldest(self) -> int:
        """Number of the batch before the oldest one that is kept."""
        return self._log.first - 1

    def number_before(self, sequence: bytes) -> int:
        """Return the number of the batch before the one with this sequence number of a message."""
        return self._log.start + int.from_bytes(sequence, "big")

    def after(self, number: int) -> Message | None:
        """Return the batch after a number as a message; None if it does not exist yet.

        Raises:
            EventsLost: the batch was dropped.
        """
        batch = self._log.after(number)
        if batch is None:
            return None
        return self.topic, (number - self._log.start).to_bytes(SEQUENCE_BYTES, "big"), self._payload(batch)
