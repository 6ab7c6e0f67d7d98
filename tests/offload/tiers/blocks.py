"""Small blocks for tests of stores. The tokens, the key and the payload of each block are derived from its number."""

from __future__ import annotations

import numpy as np

from radixkv.offload.block_keys import BlockFormat, BlockKeys
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import BlockObject, Protection, Wanted
from radixkv.offload.tiers.block_store import StoreBackend

BLOCK_SIZE = 16
PAYLOAD_BYTES = 3000  # not a multiple of a cache line or a page
FORMAT = BlockFormat("model", "float32", "fp32", "by block", BLOCK_SIZE, PAYLOAD_BYTES, "cpu")
KEYS = BlockKeys(FORMAT, b"secret")
ROOT = bytes(32)
MAC = BlockMac(b"secret", FORMAT.fingerprint)


def tokens_of(number: int) -> bytes:
    return np.random.default_rng(number).integers(0, 50_000, BLOCK_SIZE).astype("<u4").tobytes()


def key_of(number: int) -> bytes:
    return KEYS.child(ROOT, tokens_of(number))


def payload_of(number: int) -> bytes:
    return np.random.default_rng((number, 1)).bytes(PAYLOAD_BYTES)


def block(number: int, generation: int = 0, protection: Protection | None = None) -> BlockObject:
    payload = memoryview(payload_of(number))
    return BlockObject(key_of(number), ROOT, generation, tokens_of(number), payload, protection)


def wanted(number: int, protection: Protection | None = None) -> Wanted:
    return Wanted(key_of(number), tokens_of(number), protection)


def object_of(number: int, generation: int = 0, protection: Protection | None = None) -> bytes:
    """Return the bytes of the object of a block, as stores hold them."""
    return b"".join(block(number, generation, protection).pieces())


def read_from(store: StoreBackend, *numbers: int) -> list[bytes | None]:
    """Read blocks from a store. Returns the bytes of each object; None for a block that the store does not have."""
    return [loan and bytes(loan.data) for loan in store.get([key_of(number) for number in numbers])]


OBJECT_BYTES = block(0).num_bytes
