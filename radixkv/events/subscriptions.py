"""The subscriptions of one subscriber over ZMQ, and its position in the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from radixkv.events.published_batches import Message, PublishedBatches
from radixkv.events.zmtp import ZmtpError

_SUBSCRIBE, _CANCEL = 1, 0


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
