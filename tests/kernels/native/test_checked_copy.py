"""The copy in C++ is held against the bytes and against the xxhash library."""

import ctypes
import random

import numpy as np
import numpy.typing as npt
import pytest
from xxhash import xxh3_128_digest

from radixkv.kernels.native.checked_copy import NativeCopy

PAST_THE_END = 0xA5
CHECKSUM_BYTES = 16
BODIES = [*range(70), 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]


@pytest.fixture
def native_copy(library: ctypes.CDLL) -> NativeCopy:
    return NativeCopy(library)


def aligned(num_bytes: int, offset: int = 0) -> npt.NDArray[np.uint8]:
    memory = np.full(num_bytes + 128, PAST_THE_END, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + num_bytes]


@pytest.mark.parametrize("head_bytes", [0, 64, 256, 1024, 1088])
@pytest.mark.parametrize("offset", [0, 32])
def test_bytes_and_checksum_are_those_of_the_library(native_copy: NativeCopy, head_bytes: int, offset: int) -> None:
    draw = random.Random(head_bytes)
    for body_bytes in BODIES:
        head, source = draw.randbytes(head_bytes), draw.randbytes(body_bytes + 3)
        body = memoryview(source)[3:]  # no copy needs an aligned source
        room = aligned(head_bytes + body_bytes + CHECKSUM_BYTES + 16, offset)
        target = room[:-16]
        if head_bytes + body_bytes <= 240:
            assert not native_copy.takes(head, body, target)
            continue
        assert native_copy.takes(head, body, target)
        native_copy(head, body, target)
        assert target[:-CHECKSUM_BYTES].tobytes() == head + body
        assert target[-CHECKSUM_BYTES:].tobytes() == xxh3_128_digest(head + body)
        assert set(room[-16:]) == {PAST_THE_END}


def test_other_heads_and_targets_are_not_taken(native_copy: NativeCopy) -> None:
    body = memoryview(bytes(300))
    assert not native_copy.takes(bytes(63), body, aligned(379))
    assert not native_copy.takes(bytes(64), body, aligned(380, offset=16))


def test_memory_of_another_size_is_not_written(native_copy: NativeCopy) -> None:
    target = aligned(379)
    with pytest.raises(AssertionError, match="another size"):
        native_copy(bytes(64), memoryview(bytes(300)), target)
    assert set(target) == {PAST_THE_END}
