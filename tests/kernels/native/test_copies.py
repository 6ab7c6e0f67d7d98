"""Copies in C++ are compared with plain copies and with the xxhash library."""

import contextlib
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
from radixkv.kernels.native.copies import NativeCopies, ObjectFiles

PAST_THE_END = 0xA5
CHECKSUM_BYTES = 16
PAGE_BYTES = 4096
BODY_SIZES = [*range(70), 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]


@pytest.fixture
def native(library: ctypes.CDLL) -> NativeCopies:
    return NativeCopies(library)


def aligned(num_bytes: int, offset: int = 0) -> npt.NDArray[np.uint8]:
    """Allocate bytes that are all `PAST_THE_END`, `offset` bytes after an address that is a multiple of 64."""
    memory = np.full(num_bytes + 128, PAST_THE_END, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + num_bytes]


@pytest.mark.parametrize("head_bytes", [0, 64, 256, 1024, 1088])
@pytest.mark.parametrize("offset", [0, 32])
def test_bytes_and_checksum_match_the_xxhash_library(native: NativeCopies, head_bytes: int, offset: int) -> None:
    draw = random.Random(head_bytes)
    for body_bytes in BODY_SIZES:
        head, source = draw.randbytes(head_bytes), draw.randbytes(body_bytes + 3)
        body = memoryview(source)[3:]  # no copy needs an aligned source
        memory = aligned(head_bytes + body_bytes + CHECKSUM_BYTES + 16, offset)
        target = memory[:-16]
        assert native.copy_checked(head, body, target) == (head_bytes + body_bytes > 240)
        if head_bytes + body_bytes <= 240:
            continue
        assert target[:-CHECKSUM_BYTES].tobytes() == head + body
        assert target[-CHECKSUM_BYTES:].tobytes() == xxh3_128_digest(head + body)
        assert set(memory[-16:]) == {PAST_THE_END}


def test_wrong_headers_and_targets_are_rejected(native: NativeCopies) -> None:
    body = memoryview(bytes(300))
    for head_bytes, offset in ((63, 0), (64, 16)):
        target = aligned(head_bytes + 316, offset)
        assert not native.copy_checked(bytes(head_bytes), body, target)
        assert set(target) == {PAST_THE_END}


def test_memory_outside_the_target_is_not_written(native: NativeCopies) -> None:
    target = aligned(379)
    twice = aligned(2 * 380)
    locked = aligned(380)
    locked.flags.writeable = False
    for each in (target, twice[::2], locked):
        with pytest.raises(ValueError, match="expected 380 writable contiguous bytes"):
            native.copy_checked(bytes(64), memoryview(bytes(300)), each)
        assert set(each) == {PAST_THE_END}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[int, bytes, bytes], ObjectFiles]]:
    """A function that writes the bytes of heads and bodies of objects to files, and opens these."""
    with contextlib.ExitStack() as files:

        def open_(head_bytes: int, heads: bytes, bodies: bytes) -> ObjectFiles:
            descriptors = []
            for name, contents in (("heads", heads), ("bodies", bodies)):
                (tmp_path / name).write_bytes(contents)
                descriptors.append(os.open(tmp_path / name, os.O_RDWR))
                files.callback(os.close, descriptors[-1])
            return ObjectFiles(*descriptors, head_bytes)

        yield open_


Opened = Callable[[int, bytes, bytes], ObjectFiles]
PIECE_BYTES = 128 << 10
OBJECT_BODY_SIZES = (0, 1, 63, 64, 65, 4096, *(PIECE_BYTES + more for more in (-1, 0, 1, 15, 16, 17)), 300_000)


@pytest.mark.parametrize("head_bytes", [0, 64, 256, 4096, 2 * PIECE_BYTES])
def test_objects_are_read_with_their_checksums(native: NativeCopies, opened: Opened, head_bytes: int) -> None:
    draw = random.Random(head_bytes)
    objects = [
        (draw.randbytes(head_bytes), draw.randbytes(size)) for size in OBJECT_BODY_SIZES if head_bytes + size > 240
    ]
    heads, bodies = b"12345", b"123"  # in the files, other bytes precede and follow each object
    places, contents = [], []
    for head, body in objects:
        recorded_checksum = draw.randbytes(CHECKSUM_BYTES)  # the caller compares it with the computed one
        places.append((len(heads), len(bodies), len(head) + len(body) + CHECKSUM_BYTES))
        heads, bodies = heads + head + recorded_checksum + b"12", bodies + body + b"1"
        contents.append(head + body + recorded_checksum)
    targets = [aligned(len(content) + 16, offset=32) for content in contents]
    results = native.read_checked(opened(head_bytes, heads, bodies), places, [target.data for target in targets])
    assert results is not None
    for content, target, (num_bytes, digest) in zip(contents, targets, results, strict=True):
        assert num_bytes == len(content)
        assert target[:num_bytes].tobytes() == content
        assert digest == xxh3_128_digest(content[:-CHECKSUM_BYTES])
        assert set(target[num_bytes:]) == {PAST_THE_END}


@pytest.mark.parametrize("num_present", [0, 1, 63, 64, 257, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 199_999])
@pytest.mark.parametrize("is_head", [False, True])
def test_a_truncated_object_yields_its_start_and_no_checksum(
    native: NativeCopies, opened: Opened, num_present: int, *, is_head: bool
) -> None:
    """Of the second object, only `num_present` bytes of its head or of its body are in the files."""
    head_bytes = 192_000 if is_head else 64
    draw = random.Random(num_present)
    complete, truncated = draw.randbytes(head_bytes + 300), draw.randbytes(head_bytes + 200_000)
    heads = complete[:head_bytes] + bytes(CHECKSUM_BYTES) + truncated[:head_bytes]
    bodies = complete[head_bytes:] + truncated[head_bytes:]
    if is_head:
        heads = heads[: head_bytes + CHECKSUM_BYTES + num_present]
        expected = truncated[: min(num_present, head_bytes)]
    else:
        heads += bytes(CHECKSUM_BYTES)
        bodies = bodies[: 300 + num_present]
        expected = truncated[: head_bytes + num_present]
    places = [
        (0, 0, len(complete) + CHECKSUM_BYTES),
        (head_bytes + CHECKSUM_BYTES, 300, len(truncated) + CHECKSUM_BYTES),
    ]
    targets = [aligned(num_bytes) for *_, num_bytes in places]
    results = native.read_checked(opened(head_bytes, heads, bodies), places, [target.data for target in targets])
    assert results == [(places[0][2], xxh3_128_digest(complete)), (len(expected), None)]
    assert targets[1][: len(expected)].tobytes() == expected
    assert set(targets[1][len(expected) :]) <= {PAST_THE_END}


def test_short_objects_and_wrong_targets_are_not_read(native: NativeCopies, opened: Opened) -> None:
    files = opened(64, bytes(1000), bytes(1000))
    for num_bytes, offset in ((256, 0), (257, 16)):
        target = aligned(num_bytes, offset)
        assert native.read_checked(files, [(0, 0, num_bytes)], [target.data]) is None
        assert set(target) == {PAST_THE_END}
    target = aligned(591)
    assert native.read_checked(files._replace(head_bytes=576), [(0, 0, 591)], [target.data]) is None
    assert set(target) == {PAST_THE_END}
    with pytest.raises(ValueError, match="at least the size"):
        native.read_checked(files, [(0, 0, 300)], [aligned(299).data])


def test_an_unreadable_file_raises(native: NativeCopies, opened: Opened, tmp_path: Path) -> None:
    files, folder = opened(64, bytes(1000), bytes(1000)), os.open(tmp_path, os.O_RDONLY)
    for each in (files._replace(heads=folder), files._replace(bodies=folder)):
        with pytest.raises(OSError, match="directory") as raised:
            native.read_checked(each, [(0, 0, 300)], [aligned(300).data])
        assert raised.value.errno == errno.EISDIR
    os.close(folder)


def pool(*shape: int) -> npt.NDArray[np.uint8]:
    return aligned(int(np.prod(shape))).reshape(shape)


@pytest.fixture
def fills_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MIN_FILLED_BYTES", 0)


@pytest.mark.usefixtures("fills_all")
@pytest.mark.parametrize(
    "shape", [(5, 3, 2, 4, 64), (4, 1, 2, 1, 192), (3, 1, 1, 1, 4096), (4, 2, 1, 3, 128), (4, 1088)]
)
@pytest.mark.parametrize("is_by_layer", [False, True])
def test_only_blocks_are_filled_not_the_gaps_between_them(
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


def test_small_copies_go_through_the_caches(native: NativeCopies) -> None:
    size = copies.MIN_FILLED_BYTES // 2
    blocks, payload = pool(2, size), memoryview(bytes(size))
    assert not native.fill(blocks, [0], [payload])
    assert set(blocks[0]) == {PAST_THE_END}
    assert native.fill(blocks, [0, 1], [payload, payload])
    assert not blocks.any()


def test_writes_outside_the_target_are_rejected(native: NativeCopies) -> None:
    blocks, locked, payload = pool(2, 64), pool(2, 64), memoryview(bytes(64))
    locked.flags.writeable = False
    for ids, payloads in (([2], [payload]), ([-1], [payload]), ([0, 1], [payload]), ([0], [memoryview(bytes(65))])):
        with pytest.raises(ValueError, match=r"(blocks|ids): expected"):
            native.fill(blocks, ids, payloads)
    with pytest.raises(ValueError, match=r"(blocks|ids): expected"):
        native.fill(locked, [0], [payload])
    assert set(blocks.flat) == set(locked.flat) == {PAST_THE_END}


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Sets the size beyond which files are not written, until the test ends."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("head_bytes", [0, 64, 320, 4032, 4096])
def test_objects_are_written_with_the_checksum_of_the_library_and_zeros(
    native: NativeCopies, opened: Opened, tmp_path: Path, head_bytes: int
) -> None:
    mib = 1 << 20
    sizes = (*BODY_SIZES, mib - 64, mib - 1, mib, mib + 1, 2 * mib - 400, 2 * mib, 3 * mib + 777)
    draw = random.Random(head_bytes)
    written = [(draw.randbytes(head_bytes), draw.randbytes(size + 5)) for size in sizes if head_bytes + size > 240]
    objects = [(head, memoryview(body)[5:]) for head, body in written]
    expected, positions = (b"", b""), []
    for number, (head, body) in enumerate(objects):
        if number % 5 == 4:  # no neighbor of the one before
            expected = (expected[0] + bytes([PAST_THE_END]) * PAGE_BYTES, expected[1])
        positions.append((len(expected[0]), len(expected[1])))
        parts = (head + xxh3_128_digest(head + bytes(body)), bytes(body))
        expected = tuple(
            before + part + bytes(-len(part) % PAGE_BYTES) for before, part in zip(expected, parts, strict=True)
        )
    after_the_end = bytes([PAST_THE_END]) * 10
    files = opened(head_bytes, *(bytes([PAST_THE_END]) * (len(each) + 10) for each in expected))
    assert native.write_checked(files, positions, objects)
    for name, contents in zip(("heads", "bodies"), expected, strict=True):
        assert (tmp_path / name).read_bytes() == contents + after_the_end


def test_wrong_headers_and_short_objects_are_not_written(native: NativeCopies, opened: Opened, tmp_path: Path) -> None:
    files, body = opened(64, b"", b""), memoryview(bytes(300))
    assert not native.write_checked(files, [(0, 0)], [(bytes(64), body[:176])])
    with pytest.raises(ValueError, match=r"expected heads of 64 bytes, got \[128\]"):
        native.write_checked(files, [(0, 0)], [(bytes(128), body)])
    with pytest.raises(ValueError, match="head_bytes: expected a multiple of 64, got 63"):
        native.write_checked(files._replace(head_bytes=63), [(0, 0)], [(bytes(63), body)])
    with pytest.raises(ValueError, match="head_bytes: expected a multiple of 64, got 63"):
        native.read_checked(files._replace(head_bytes=63), [(0, 0, 379)], [aligned(379).data])
    assert not (tmp_path / "heads").read_bytes() + (tmp_path / "bodies").read_bytes()


def test_a_partial_write_raises(
    native: NativeCopies, opened: Opened, tmp_path: Path, largest_file: Callable[[int], None]
) -> None:
    head, body = bytes(range(64)), random.Random(1).randbytes(3 << 20)
    files = opened(64, b"", b"")
    largest_file((1 << 20) + 1000)
    with pytest.raises(OSError, match="large") as raised:
        native.write_checked(files, [(0, 0)], [(head, memoryview(body))])
    assert raised.value.errno == errno.EFBIG
    assert (tmp_path / "bodies").read_bytes() == body[: (1 << 20) + 1000]
    assert (tmp_path / "heads").read_bytes() == b""


def test_an_unwritable_file_raises(native: NativeCopies, opened: Opened, tmp_path: Path) -> None:
    files, read_only = opened(64, b"", b""), os.open(tmp_path / "heads", os.O_RDONLY)
    for each in (files._replace(heads=read_only), files._replace(bodies=read_only)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            native.write_checked(each, [(0, 0)], [(bytes(64), memoryview(bytes(300)))])
    os.close(read_only)
