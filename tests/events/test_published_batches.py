from __future__ import annotations

import msgpack
import numpy as np
import pytest

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch
from radixkv.events.published_batches import payload_of

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
