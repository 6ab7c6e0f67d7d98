from __future__ import annotations

import numpy as np
import pytest

from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import (
    CHECKSUM_BYTES,
    HEAD_BYTES,
    ObjectFault,
    Protection,
    Wanted,
    checksum_of,
    object_bytes,
    open_object,
    read_head,
)
from radixkv.offload.tiers.sealing import BlockCipher
from radixkv.tokens import TOKEN_BYTES

from .backends import native_or_skip
from .blocks import (
    BLOCK_SIZE,
    FORMAT,
    MAC,
    PAYLOAD_BYTES,
    ROOT,
    block,
    key_of,
    object_of,
    payload_of,
    tokens_of,
    wanted,
)

CIPHER = BlockCipher(bytes(range(32)))


def opened(data: bytes, number: int = 1, protection: Protection | None = None) -> object:
    """Return the payload of an object as the block with a number, or its fault."""
    payload = open_object(memoryview(data), wanted(number, protection), PAYLOAD_BYTES)
    return payload if isinstance(payload, ObjectFault) else bytes(payload)


@pytest.mark.parametrize("protection", [None, CIPHER, MAC], ids=["plain", "sealed", "authenticated"])
def test_a_packed_object_opens(protection: Protection | None) -> None:
    data = object_of(1, 3, protection)
    assert opened(data, 1, protection) == payload_of(1)
    assert len(data) == block(1, 3, protection).num_bytes
    assert len(data) == object_bytes(BLOCK_SIZE, PAYLOAD_BYTES, is_sealed=protection is CIPHER)
    head = read_head(data)
    assert head is not None
    assert (head.key, head.parent, head.generation, head.num_tokens) == (key_of(1), ROOT, 3, BLOCK_SIZE)


@pytest.mark.parametrize("protection", [None, CIPHER, MAC], ids=["plain", "sealed", "authenticated"])
def test_write_to_writes_the_same_bytes_as_pieces(protection: Protection | None) -> None:
    memory = np.zeros(block(1, 3, protection).num_bytes, np.uint8)
    block(1, 3, protection).write_to(memory)
    assert opened(memory.tobytes(), 1, protection) == payload_of(1)
    if protection is None:  # with protection, each object has a random salt
        assert memory.tobytes() == object_of(1, 3)


@pytest.mark.parametrize("offset", [0, 16])
def test_copies_in_cpp_write_the_same_object_wherever_it_is(offset: int) -> None:
    memory_with_margin = np.zeros(block(1, 3).num_bytes + 128, np.uint8)
    start = -memory_with_margin.ctypes.data % 64 + offset
    memory = memory_with_margin[start : start + block(1, 3).num_bytes]
    block(1, 3).write_to(memory, native_or_skip())
    assert memory.tobytes() == object_of(1, 3)


def test_a_payload_is_a_view_of_the_object_and_aligned() -> None:
    data = memoryview(object_of(1))
    payload = open_object(data, wanted(1), PAYLOAD_BYTES)
    assert isinstance(payload, memoryview)
    assert payload.obj is data.obj
    start = HEAD_BYTES + TOKEN_BYTES * BLOCK_SIZE  # 128 bytes and 64 bytes, so there is no padding
    assert start % 64 == 0
    assert payload == data[start : start + PAYLOAD_BYTES]


@pytest.mark.parametrize("protection", [None, CIPHER, MAC], ids=["plain", "sealed", "authenticated"])
def test_an_object_of_another_block_is_foreign(protection: Protection | None) -> None:
    assert opened(object_of(2, 0, protection), 1, protection) is ObjectFault.FOREIGN


def test_a_payload_that_changes_during_the_copy_is_detected() -> None:
    payload = bytearray(PAYLOAD_BYTES)
    changing = block(1)._replace(payload=memoryview(payload))
    pieces = []
    for piece in changing.pieces():
        if len(piece) == PAYLOAD_BYTES:
            payload[7] ^= 1
        pieces.append(bytes(piece))
    assert opened(b"".join(pieces)) is ObjectFault.DAMAGED


def test_a_known_checksum_is_used() -> None:
    data = memoryview(object_of(1))
    assert open_object(data, wanted(1), PAYLOAD_BYTES, checksum=checksum_of(data)) == payload_of(1)
    assert open_object(data, wanted(1), PAYLOAD_BYTES, checksum=bytes(16)) is ObjectFault.DAMAGED


def test_an_object_may_have_one_of_several_sizes() -> None:
    assert open_object(memoryview(object_of(1)), wanted(1), PAYLOAD_BYTES + 1, PAYLOAD_BYTES) == payload_of(1)


def test_an_object_of_another_size_is_foreign() -> None:
    assert open_object(memoryview(object_of(1)), wanted(1), PAYLOAD_BYTES + 1) is ObjectFault.FOREIGN


@pytest.mark.parametrize("data", [bytes(5000), b"RKVBLOCK" + bytes(5000), b"\x00" * HEAD_BYTES, b"x" * 144])
def test_other_bytes_are_foreign(data: bytes) -> None:
    assert opened(data) is ObjectFault.FOREIGN


@pytest.mark.parametrize("length", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 70, -17, -16, -1])
def test_a_truncated_object_is_detected(length: int) -> None:
    assert opened(object_of(1)[:length]) is ObjectFault.CUT


def test_an_object_that_is_too_long_is_detected() -> None:
    assert opened(object_of(1) + b"x") is ObjectFault.CUT


def test_other_tokens_under_the_same_key_are_detected() -> None:
    """No known method can construct such an object."""
    other = Wanted(key_of(1), tokens_of(2))
    assert open_object(memoryview(object_of(1)), other, PAYLOAD_BYTES) is ObjectFault.OTHER_TOKENS
    shorter = Wanted(key_of(1), tokens_of(1)[:-4])
    assert open_object(memoryview(object_of(1)), shorter, PAYLOAD_BYTES) is ObjectFault.OTHER_TOKENS


def test_a_changed_byte_is_detected_wherever_it_is() -> None:
    data = object_of(1)
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        assert isinstance(opened(bytes(changed)), ObjectFault), position


def test_the_key_of_another_tenant_opens_nothing() -> None:
    other = BlockCipher(bytes(32))
    assert opened(object_of(1, 0, CIPHER), 1, other) is ObjectFault.UNSEALED
    assert opened(object_of(1, 0, CIPHER)) is ObjectFault.UNSEALED
    assert opened(object_of(1), 1, CIPHER) is ObjectFault.UNSEALED


def test_an_object_without_the_mac_of_the_secret_is_unauthentic() -> None:
    theirs = BlockMac(b"another secret", FORMAT.fingerprint)
    of_another_model = BlockMac(b"secret", "another format")
    for data in (object_of(1), object_of(1, 0, theirs), object_of(1, 0, of_another_model)):
        assert opened(data, 1, MAC) is ObjectFault.UNAUTHENTIC
    assert opened(object_of(2, 0, theirs), 1, MAC) is ObjectFault.UNAUTHENTIC, (
        "only an authentic key shows that it is another block"
    )
    assert opened(bytes(5000), 1, MAC) is ObjectFault.UNAUTHENTIC
    assert opened(object_of(1, 0, CIPHER), 1, MAC) is ObjectFault.UNSEALED, (
        "it may belong to a server that uses encryption"
    )


def test_without_a_secret_objects_with_a_mac_are_used() -> None:
    """A server of a fleet without a secret adds a MAC, and a server outside the fleet may trust it."""
    assert opened(object_of(1, 0, MAC)) == payload_of(1)


def test_each_byte_of_an_object_is_authenticated() -> None:
    data = object_of(1, 0, MAC)
    for position in range(len(data) - CHECKSUM_BYTES):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        changed[-CHECKSUM_BYTES:] = checksum_of(memoryview(changed))
        assert isinstance(opened(bytes(changed), 1, MAC), ObjectFault), position
