from __future__ import annotations

import msgpack
import numpy as np
import pytest

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch
from radixkv.errors import EventsLost
from radixkv.events.published_batches import PublishedBatches, payload_of
from radixkv.events.replays import ReplayReader
from radixkv.events.subscriptions import SubscriptionReader

HASHES = [2**64 - 1, 7]
PACKED = np.array(HASHES, "<u8").tobytes()
TOKENS = np.array([2**32 - 1, 1, 2, 3], "<u4").tobytes()
PLAIN = BlocksStored(None, PACKED, TOKENS, 2, "")
SALTED = BlocksStored(2**63, PACKED, TOKENS, 2, "0a" * 16)
IN_A_STORE = BlocksStored(None, PACKED, b"", 2, "", "host"), BlocksRemoved(PACKED, "", "host")  # only gRPC reports them
REMOVALS = BlocksRemoved(PACKED, ""), BlocksRemoved(PACKED, "0a" * 16)
BATCH = EventBatch(5, 12.5, (PLAIN, SALTED, *IN_A_STORE, *REMOVALS, AllCleared()))


def test_arrays_contain_the_blocks_on_the_device_without_a_salt() -> None:
    assert msgpack.unpackb(payload_of(BATCH, "array")) == [
        12.5,
        [
            ["BlockStored", HASHES, None, [2**32 - 1, 1, 2, 3], 2, None, "GPU", None, None],
            ["BlockRemoved", HASHES, "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


STORED = {
    "type": "BlockStored",
    "block_hashes": HASHES,
    "parent_block_hash": None,
    "token_ids": [2**32 - 1, 1, 2, 3],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": HASHES, "medium": "GPU"}


@pytest.mark.parametrize("form", ["map", "plain_map"])
def test_maps_contain_the_blocks_on_the_device_without_a_salt(form: str) -> None:
    assert msgpack.unpackb(payload_of(BATCH, form)) == [12.5, [STORED, REMOVED, {"type": "AllBlocksCleared"}], 0]


@pytest.mark.parametrize("form", ["array", "map", "plain_map"])
def test_no_form_contains_blocks_of_a_namespace_with_a_salt(form: str) -> None:
    salted = BlocksStored(None, PACKED, TOKENS, 2, "0a" * 16), BlocksRemoved(PACKED, "0a" * 16)
    assert msgpack.unpackb(payload_of(EventBatch(1, 2.0, salted), form)) == [2.0, [], 0]


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
