"""The copies in C++ are held against the bytes and against the xxhash library."""

import ctypes
import errno
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from xxhash import xxh3_128_digest

from radixkv.kernels.native import copies
from radixkv.kernels.native.copies import NativeCopies

PAST_THE_END = 0xA5
CHECKSUM_BYTES = 16
PAGE_BYTES = 4096
BODIES = [*range(70), 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]


@pytest.fixture
def native(library: ctypes.CDLL) -> NativeCopies:
    return NativeCopies(library)


def aligned(num_bytes: int, offset: int = 0) -> npt.NDArray[np.uint8]:
    memory = np.full(num_bytes + 128, PAST_THE_END, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + num_bytes]


@pytest.mark.parametrize("head_bytes", [0, 64, 256, 1024, 1088])
@pytest.mark.parametrize("offset", [0, 32])
def test_bytes_and_checksum_are_those_of_the_library(native: NativeCopies, head_bytes: int, offset: int) -> None:
    draw = random.Random(head_bytes)
    for body_bytes in BODIES:
        head, source = draw.randbytes(head_bytes), draw.randbytes(body_bytes + 3)
        body = memoryview(source)[3:]  # no copy needs an aligned source
        room = aligned(head_bytes + body_bytes + CHECKSUM_BYTES + 16, offset)
        target = room[:-16]
        assert native.copy_checked(head, body, target) == (head_bytes + body_bytes > 240)
        if head_bytes + body_bytes <= 240:
            continue
        assert target[:-CHECKSUM_BYTES].tobytes() == head + body
        assert target[-CHECKSUM_BYTES:].tobytes() == xxh3_128_digest(head + body)
        assert set(room[-16:]) == {PAST_THE_END}


def test_other_heads_and_targets_are_not_taken(native: NativeCopies) -> None:
    body = memoryview(bytes(300))
    for head_bytes, offset in ((63, 0), (64, 16)):
        target = aligned(head_bytes + 316, offset)
        assert not native.copy_checked(bytes(head_bytes), body, target)
        assert set(target) == {PAST_THE_END}


def test_other_memory_is_not_written(native: NativeCopies) -> None:
    target = aligned(379)
    twice = aligned(2 * 380)
    locked = aligned(380)
    locked.flags.writeable = False
    for each in (target, twice[::2], locked):
        with pytest.raises(ValueError, match="expected 380 writable bytes in one piece"):
            native.copy_checked(bytes(64), memoryview(bytes(300)), each)
        assert set(each) == {PAST_THE_END}


SIZES = (257, 258, 320, 336, 337, 4096, 131_071, 131_072, 131_073, 131_088, 131_089, 300_000)


def test_objects_are_read_with_their_checksums(native: NativeCopies, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1_400_000)
    (tmp_path / "objects").write_bytes(data)
    places, start = [], 5
    for size in SIZES:
        places.append((start, size))
        start += size + 3
    rooms = [aligned(size + 16, offset=32) for size in SIZES]
    with (tmp_path / "objects").open("rb") as file:
        found = native.read_checked(file.fileno(), places, [room.data for room in rooms])
    assert found is not None
    for (start, size), room, (count, digest) in zip(places, rooms, found, strict=True):
        assert count == size
        assert room[:size].tobytes() == data[start : start + size]
        assert digest == xxh3_128_digest(data[start : start + size - CHECKSUM_BYTES])
        assert set(room[size:]) == {PAST_THE_END}


@pytest.mark.parametrize("there", [0, 1, 63, 64, 257, 131_071, 131_072, 131_073, 199_984, 199_999])
def test_of_a_cut_object_there_is_its_beginning_and_no_checksum(
    native: NativeCopies, tmp_path: Path, there: int
) -> None:
    data = random.Random(there).randbytes(1000 + there)
    (tmp_path / "objects").write_bytes(data)
    rooms = [aligned(300), aligned(200_000)]
    with (tmp_path / "objects").open("rb") as file:
        found = native.read_checked(file.fileno(), [(0, 300), (1000, 200_000)], [room.data for room in rooms])
    assert found == [(300, xxh3_128_digest(data[: 300 - CHECKSUM_BYTES])), (there, None)]
    assert rooms[1][:there].tobytes() == data[1000:]
    assert set(rooms[1][there:]) == {PAST_THE_END}


def test_short_objects_and_other_targets_are_not_read(native: NativeCopies, tmp_path: Path) -> None:
    (tmp_path / "objects").write_bytes(bytes(1000))
    with (tmp_path / "objects").open("rb") as file:
        for size, offset in ((256, 0), (257, 16)):
            room = aligned(size, offset)
            assert native.read_checked(file.fileno(), [(0, size)], [room.data]) is None
            assert set(room) == {PAST_THE_END}
        with pytest.raises(ValueError, match="got less"):
            native.read_checked(file.fileno(), [(0, 300)], [aligned(299).data])


def test_a_file_that_can_not_be_read_is_an_error(native: NativeCopies, tmp_path: Path) -> None:
    file = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="directory") as raised:
        native.read_checked(file, [(0, 300)], [aligned(300).data])
    os.close(file)
    assert raised.value.errno == errno.EISDIR


def pool(*shape: int) -> npt.NDArray[np.uint8]:
    return aligned(int(np.prod(shape))).reshape(shape)


@pytest.fixture
def fills_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LEAST_FILLED_BYTES", 0)


@pytest.mark.usefixtures("fills_all")
@pytest.mark.parametrize(
    "shape", [(5, 3, 2, 4, 64), (4, 1, 2, 1, 192), (3, 1, 1, 1, 4096), (4, 2, 1, 3, 128), (4, 1088)]
)
@pytest.mark.parametrize("is_by_layer", [False, True])
def test_blocks_are_filled_and_nothing_between(
    native: NativeCopies, shape: tuple[int, ...], *, is_by_layer: bool
) -> None:
    memory = np.moveaxis(pool(*shape[1:-1], *shape[:1], *shape[-1:]), -2, 0) if is_by_layer else pool(*shape)
    draw, expected = random.Random(1), memory.copy()
    payloads = [draw.randbytes(memory[0].size) for _ in range(2)]
    for number, payload in zip((2, 0), payloads, strict=True):
        expected[number] = np.frombuffer(payload, np.uint8).reshape(shape[1:])
    assert native.fill(memory, (2, 0), [memoryview(payload) for payload in payloads])
    assert np.array_equal(memory, expected)


@pytest.mark.usefixtures("fills_all")
@pytest.mark.parametrize(
    "blocks",
    [
        pool(4, 100),
        pool(4, 2, 3, 64)[:, :, 1:, :32],
        pool(4, 2, 3, 64)[:, :, ::2],
        pool(4, 128)[:, ::2],
        pool(4, 65)[:, :64],
        aligned(256, offset=16).reshape(4, 64),
    ],
)
def test_other_blocks_are_not_filled(native: NativeCopies, blocks: npt.NDArray[np.uint8]) -> None:
    assert not native.fill(blocks, [1], [memoryview(bytes(blocks[0].size))])
    assert set(blocks.flat) == {PAST_THE_END}


def test_a_few_bytes_are_left_to_the_caches(native: NativeCopies) -> None:
    size = copies.LEAST_FILLED_BYTES // 2
    blocks, payload = pool(2, size), memoryview(bytes(size))
    assert not native.fill(blocks, [0], [payload])
    assert set(blocks[0]) == {PAST_THE_END}
    assert native.fill(blocks, [0, 1], [payload, payload])
    assert not blocks.any()


def test_what_would_be_written_elsewhere_is_refused(native: NativeCopies) -> None:
    blocks, locked, payload = pool(2, 64), pool(2, 64), memoryview(bytes(64))
    locked.flags.writeable = False
    for ids, payloads in (([2], [payload]), ([-1], [payload]), ([0, 1], [payload]), ([0], [memoryview(bytes(65))])):
        with pytest.raises(ValueError, match="blocks: expected"):
            native.fill(blocks, ids, payloads)
    with pytest.raises(ValueError, match="blocks: expected"):
        native.fill(locked, [0], [payload])
    assert set(blocks.flat) == set(locked.flat) == {PAST_THE_END}


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Sets the size beyond which files are not written, until the test ends."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("head_bytes", [0, 64, 320, 4096])
def test_objects_are_written_with_the_checksum_of_the_library_and_zeros(
    native: NativeCopies, tmp_path: Path, head_bytes: int
) -> None:
    mib = 1 << 20
    sizes = (*BODIES, mib - 64, mib - 1, mib, 2 * mib - 400, 2 * mib - 64, 2 * mib, 2 * mib + 1, 3 * mib + 777)
    draw = random.Random(head_bytes)
    written = [(draw.randbytes(head_bytes), draw.randbytes(size + 5)) for size in sizes if head_bytes + size > 240]
    objects = [(head, memoryview(body)[5:]) for head, body in written]
    positions, end = [], 0
    for head, body in objects:
        positions.append(end)
        end += -(-(len(head) + len(body) + CHECKSUM_BYTES) // PAGE_BYTES) * PAGE_BYTES
    path = tmp_path / "objects"
    path.write_bytes(bytes([PAST_THE_END]) * (end + 10))
    with path.open("r+b") as file:
        assert native.write_checked(file.fileno(), positions, objects)
    data = path.read_bytes()
    for position, upto, (head, body) in zip(positions, [*positions[1:], end], objects, strict=True):
        whole = head + body
        found = data[position:upto]
        assert found[: len(whole)] == whole
        assert found[len(whole) : len(whole) + CHECKSUM_BYTES] == xxh3_128_digest(whole)
        assert not any(found[len(whole) + CHECKSUM_BYTES :])
    assert set(data[end:]) == {PAST_THE_END}


def test_other_heads_and_short_objects_are_not_written(native: NativeCopies, tmp_path: Path) -> None:
    path = tmp_path / "objects"
    path.write_bytes(b"")
    with path.open("r+b") as file:
        for head_bytes, body_bytes in ((63, 300), (64, 176)):
            assert not native.write_checked(file.fileno(), [0], [(bytes(head_bytes), memoryview(bytes(body_bytes)))])
    assert path.read_bytes() == b""


def test_a_file_that_takes_a_part_gets_it_and_the_rest_is_an_error(
    native: NativeCopies, tmp_path: Path, largest_file: Callable[[int], None]
) -> None:
    head, body = bytes(range(64)), random.Random(1).randbytes(3 << 20)
    path = tmp_path / "objects"
    largest_file((1 << 20) + 1000)
    with path.open("w+b") as file, pytest.raises(OSError, match="large") as raised:
        native.write_checked(file.fileno(), [0], [(head, memoryview(body))])
    assert raised.value.errno == errno.EFBIG
    assert path.read_bytes() == (head + body)[: (1 << 20) + 1000]


def test_a_file_that_can_not_be_written_is_an_error(native: NativeCopies, tmp_path: Path) -> None:
    (tmp_path / "objects").write_bytes(b"")
    with (tmp_path / "objects").open("rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        native.write_checked(file.fileno(), [0], [(bytes(64), memoryview(bytes(300)))])
