"""A subscriber that was overtaken continues with the oldest batch that is kept."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import EventsLost
from radixkv.events.subscriptions import SubscriptionReader


class Batches:
    """Batches that are replaced `num_lost` times while they are read."""

    topic = b"kv"

    def __init__(self, num_lost: int) -> None:
        self.last = 10
        self.before_oldest = 5
        self.num_lost = num_lost

    def after(self, number: int) -> Any:
        if self.num_lost:
            self.num_lost -= 1
            self.before_oldest += 1
            self.last += 1
            raise EventsLost("lost")
        return (self.topic, number.to_bytes(8, "big"), b"") if number < self.last else None


@pytest.mark.parametrize("num_lost", [1, 2, 20_000])
def test_a_reader_that_is_overtaken_again_and_again_continues(num_lost: int) -> None:
    batches = Batches(num_lost)
    reader = SubscriptionReader(batches)  # type: ignore[arg-type]
    reader.receive([b"\x01"])
    for number in range(5):
        message = reader.next_message()
        assert message is not None
        assert int.from_bytes(message[1], "big") == 5 + num_lost + number
    assert reader.next_message() is None
