"""A subscriber that was overtaken continues with the oldest batch that is kept."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import EventsLost
from radixkv.events.subscriptions import SubscriptionReader


class Batches:
    """Fakes the published batches while the engine overtakes a reader: `num_overtakes` reads fail with `EventsLost`.

    With each of them, a new batch replaces the oldest one. Five batches are kept.
    """

    topic = b"kv"

    def __init__(self, num_overtakes: int) -> None:
        self.last = 10
        self.before_oldest = 5
        self.num_overtakes = num_overtakes

    def after(self, number: int) -> Any:
        if self.num_overtakes:
            self.num_overtakes -= 1
            self.before_oldest += 1
            self.last += 1
            raise EventsLost("lost")
        return (self.topic, number.to_bytes(8, "big"), b"") if number < self.last else None


@pytest.mark.parametrize("num_overtakes", [1, 2, 20_000])
def test_a_reader_that_is_overtaken_again_and_again_continues(num_overtakes: int) -> None:
    batches = Batches(num_overtakes)
    reader = SubscriptionReader(batches)  # type: ignore[arg-type]
    reader.receive([b"\x01"])
    for index in range(5):
        message = reader.next_message()
        assert message is not None
        assert int.from_bytes(message[1], "big") == 5 + num_overtakes + index
    assert reader.next_message() is None
