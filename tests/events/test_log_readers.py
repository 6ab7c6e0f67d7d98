"""A reader that was overtaken continues with the oldest batch that is kept."""

from __future__ import annotations

import pytest

from radixkv.api.events import EventBatch
from radixkv.errors import EventsLost
from radixkv.events.log_readers import ReplayReader, SubscriptionReader
from radixkv.events.published_batches import PublishedBatches


class OvertakingLog:
    """Fakes the log while the engine overtakes a reader: `num_overtakes` reads fail with `EventsLost`.

    With each of them, a new batch replaces the oldest one. Five batches are kept.
    """

    start = 0

    def __init__(self, num_overtakes: int) -> None:
        self.first = 6
        self.last = 10
        self.num_overtakes = num_overtakes

    def after(self, number: int) -> EventBatch | None:
        if self.num_overtakes:
            self.num_overtakes -= 1
            self.first += 1
            self.last += 1
            raise EventsLost("lost")
        return EventBatch(number + 1, 0.0, ()) if number < self.last else None


def overtaking_batches(num_overtakes: int) -> PublishedBatches:
    return PublishedBatches(OvertakingLog(num_overtakes), b"kv", "array")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_overtakes", [1, 2, 20_000])
def test_a_subscriber_that_is_overtaken_again_and_again_continues_with_the_oldest_batch(num_overtakes: int) -> None:
    reader = SubscriptionReader(overtaking_batches(num_overtakes))
    reader.receive([b"\x01"])
    for index in range(5):
        message = reader.next_message()
        assert message is not None
        assert int.from_bytes(message[1], "big") == 5 + num_overtakes + index
    assert reader.next_message() is None


@pytest.mark.parametrize("num_overtakes", [1, 2, 20_000])
def test_a_replay_that_is_overtaken_again_and_again_continues_with_the_oldest_batch(num_overtakes: int) -> None:
    batches = overtaking_batches(num_overtakes)
    reader = ReplayReader(batches, lambda: None)
    reader.receive([b"", bytes(8)])
    for index in range(5):
        message = reader.next_message()
        assert message is not None
        assert int.from_bytes(message[2], "big") == 5 + num_overtakes + index
    assert reader.next_message() == (b"", *batches.end)
    assert not reader.is_busy
