from __future__ import annotations

import msgpack
import numpy as np

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch
from radixkv.events.zmq_forms import array_payload, map_payload, plain_map_payload

HASHES = [2**64 - 1, 7]
PACKED = np.array(HASHES, "<u8").tobytes()
TOKENS = np.array([2**32 - 1, 1, 2, 3], "<u4").tobytes()
PLAIN = BlocksStored(None, PACKED, TOKENS, 2, "")
SALTED = BlocksStored(2**63, PACKED, TOKENS, 2, "0a" * 16)
IN_A_STORE = BlocksStored(None, PACKED, b"", 2, "", "host"), BlocksRemoved(PACKED, "", "host")  # told over gRPC alone
REMOVALS = BlocksRemoved(PACKED, ""), BlocksRemoved(PACKED, "0a" * 16)
BATCH = EventBatch(5, 12.5, (PLAIN, SALTED, *IN_A_STORE, *REMOVALS, AllCleared()))


def test_arrays_hold_what_may_be_matched_by_tokens() -> None:
    assert msgpack.unpackb(array_payload(BATCH)) == [
        12.5,
        [
            ["BlockStored", HASHES, None, [2**32 - 1, 1, 2, 3], 2, None, "GPU", None, None],
            ["BlockRemoved", HASHES, "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


def test_a_batch_without_such_events_is_an_empty_message() -> None:
    assert msgpack.unpackb(array_payload(EventBatch(1, 2.0, (SALTED,)))) == [2.0, [], 0]


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


def test_plain_maps_hold_what_may_be_matched_by_tokens() -> None:
    assert msgpack.unpackb(plain_map_payload(BATCH)) == [12.5, [STORED, REMOVED, {"type": "AllBlocksCleared"}], 0]


def test_maps_isolate_by_a_salt() -> None:
    assert msgpack.unpackb(map_payload(BATCH)) == [
        12.5,
        [
            STORED,
            {**STORED, "parent_block_hash": 2**63, "cache_salt": "0a" * 16},
            REMOVED,
            REMOVED,
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
