"""The event log as the messages that vLLM publishes over ZMQ: msgpack, with events as arrays or as maps.

    array       ["BlockStored", hashes, parent, tokens, block size, lora id, medium, lora name, extra keys]
    map         {"type": "BlockStored", "block_hashes": hashes, ...}, also called plain_map

Source: vLLM's `KVEventBatch`. Blocks that must not be matched by tokens alone, such as those of salted prompts, are
omitted, because readers over ZMQ have no credentials.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from radixkv.api.events import AllCleared, BlocksStored, Event, EventBatch
from radixkv.errors import EventsLost
from radixkv.events.event_log import EventLog

SEQUENCE_BYTES = 8
_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_MAX_PAYLOADS = 32  # cached payloads: 6 MB if a step stores 2,048 blocks of 16 tokens
_MEDIUM = "GPU"  # vLLM's name for the pool that attention reads, on any device
_RANK = 0  # of data parallelism

Message = tuple[bytes, bytes, bytes]


class PublishedBatches:
    """Writes batches as `(topic, sequence, payload)`. Sequence numbers begin with 0 at each start of the process.

    Args:
        log: the batches.
        topic: the topic of all messages.
        form: the form of events, as in `EventsConfig`.

    Attributes:
        topic: the argument `topic`.
        end: the message after the last batch of a replay.
    """

    def __init__(self, log: EventLog, topic: bytes, form: str) -> None:
        self.topic = topic
        self.end: Message = (topic, _END, b"")
        self._log = log
        self._form = form
        self._payload_of = lru_cache(maxsize=_MAX_PAYLOADS)(payload_of)

    @property
    def last(self) -> int:
        """Number of the last batch."""
        return self._log.last

    def number_before(self, sequence: bytes) -> int:
        """Return the number of the batch before the one with this sequence number of a message."""
        return self._log.start + int.from_bytes(sequence, "big")

    def next_after(self, number: int) -> tuple[int, Message] | None:
        """Return the batch after a number, or the oldest one that is kept if that batch was dropped.

        Returns:
            The number of the batch, and its message; None if it does not exist yet.
        """
        while True:
            try:
                batch = self._log.after(number)
            except EventsLost:
                number = self._log.first - 1
                if number >= self._log.last:
                    return None
                time.sleep(0)  # lets the thread that appends run, which may have dropped this batch, too
                continue
            if batch is None:
                return None
            sequence = (number - self._log.start).to_bytes(SEQUENCE_BYTES, "big")
            return number + 1, (self.topic, sequence, self._payload_of(batch, self._form))


def payload_of(batch: EventBatch, form: str) -> bytes:
    """Write the events of a batch that need no isolation. The payload may have no events."""
    as_form = _as_array if form == "array" else _as_map
    events = [as_form(event) for event in batch.device_events if isinstance(event, AllCleared) or not event.cache_salt]
    payload: bytes = msgpack.packb([batch.time_s, events, _RANK])
    return payload


def _as_array(event: Event) -> list[Any]:
    if isinstance(event, AllCleared):
        return ["AllBlocksCleared"]
    hashes = _numbers(event.block_hashes, "<u8")
    if isinstance(event, BlocksStored):
        tokens = _numbers(event.tokens, "<u4")
        return ["BlockStored", hashes, event.parent_hash, tokens, event.block_size, None, _MEDIUM, None, None]
    return ["BlockRemoved", hashes, _MEDIUM]


def _as_map(event: Event) -> dict[str, Any]:
    if isinstance(event, AllCleared):
        return {"type": "AllBlocksCleared"}
    hashes = _numbers(event.block_hashes, "<u8")
    if not isinstance(event, BlocksStored):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": event.parent_hash,
        "token_ids": _numbers(event.tokens, "<u4"),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
    }


def _numbers(packed: bytes, dtype: str) -> list[int]:
    numbers: list[int] = np.frombuffer(packed, dtype).tolist()
    return numbers
