from __future__ import annotations

import numpy as np

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch, SnapshotPart
from radixkv.service.fleet.event_messages import batch_of
from radixkv.service.server.events.servicer import EventServicer
from radixkv.v1.events_pb2 import EventBatch as Message

EVENTS = (
    AllCleared(),
    BlocksStored(None, np.array([1, 2**64 - 1], "<u8").tobytes(), np.arange(8, dtype="<u4").tobytes(), 4, ""),
    BlocksStored(2**64 - 1, np.array([7], "<u8").tobytes(), np.arange(4, dtype="<u4").tobytes(), 4, "name"),
    BlocksStored(None, np.array([7], "<u8").tobytes(), b"", 4, "name", "host"),
    BlocksRemoved(np.array([1], "<u8").tobytes(), "name"),
    BlocksRemoved(np.array([7], "<u8").tobytes(), "name", "redis"),
)


def test_what_the_service_writes_is_read_as_it_was() -> None:
    for part in (None, SnapshotPart(1, 3, 99)):
        batch = EventBatch(12, 3.5, EVENTS, part)
        read = batch_of(Message.FromString(EventServicer(None, 1)._write(batch, True)))  # type: ignore[arg-type]
        assert (read.sequence_number, read.time_s, read.events, read.snapshot) == (12, 3.5, EVENTS, part)
