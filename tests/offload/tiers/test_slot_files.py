from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.offload.tiers.block_object import (
    CHECKSUM_BYTES,
    HEAD_BYTES,
    BlockObject,
    object_bytes,
    open_object,
    read_head,
)
from radixkv.offload.tiers.sealing import TAG_BYTES, BlockCipher
from radixkv.offload.tiers.slot_files import PAGE_BYTES, Line, SlotFiles, SlotSizes
from radixkv.tokens import TOKEN_BYTES

from .backends import native_or_skip
from .blocks import BLOCK_SIZE, OBJECT_BYTES, PAYLOAD_BYTES, ROOT, block, object_of, payload_of, tokens_of, wanted

MIB = 1 << 20
SIZES = SlotSizes.of(HEAD_BYTES + TOKEN_BYTES * BLOCK_SIZE + MIB + CHECKSUM_BYTES, MIB)
SMALL = SlotSizes.of(OBJECT_BYTES + TAG_BYTES, PAYLOAD_BYTES)  # also for encrypted objects
CIPHER = BlockCipher(bytes(range(32)))


def buffer_for(sizes: SlotSizes) -> memoryview:
    return memoryview(mmap.mmap(-1, sizes.buffer_bytes))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SlotFiles]:
    files = SlotFiles(tmp_path, SIZES, 8)
    while len(files.grow()):
        pass
    yield files
    files.close()


def tiny_object(number: int, payload_bytes: int = 3) -> BlockObject:
    """Return an object whose key consists of the byte `number`."""
    payload = np.random.default_rng(number).bytes(payload_bytes)
    return BlockObject(bytes([number]) * 32, ROOT, 0, tokens_of(number), memoryview(payload))


def read(files: SlotFiles, *slots: int) -> list[int]:
    """Return the first byte of the key in each slot; 0 for a slot without an object."""
    buffers = [buffer_for(SIZES) for _ in slots]
    objects = files.read([(slot, tiny_object(0).num_bytes) for slot in slots], buffers)
    heads = [read_head(data) for data, _ in objects]
    return [head.key[0] if head is not None else 0 for head in heads]


@pytest.mark.parametrize("payload_bytes", [1, 63, 64, 4095, 4096, 4097, MIB])
def test_slots_have_room_for_plain_and_sealed_objects(payload_bytes: int) -> None:
    for num_tokens in range(1, 1100):
        plain, sealed = (object_bytes(num_tokens, payload_bytes, is_sealed=each) for each in (False, True))
        sizes = SlotSizes.of(max(plain, sealed), payload_bytes)
        assert plain in sizes.object_sizes
        assert sealed in sizes.object_sizes
        assert sizes.object_sizes[0] <= sizes.head_slot_bytes
        assert not sizes.head_bytes % 64
        assert not sizes.slot_bytes % PAGE_BYTES


def test_objects_are_read_in_the_order_of_slots_and_returned_in_that_of_the_call(
    files: SlotFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_objects([(slot, tiny_object(slot + 1)) for slot in range(4)])
    slots_read: list[tuple[int, int]] = []
    preadv = os.preadv

    def record_and_call(descriptor: int, buffers: Any, position: int) -> int:
        slot_bytes = SIZES.head_slot_bytes if descriptor == files._heads else SIZES.body_slot_bytes
        slots_read.append((descriptor, position // slot_bytes))
        return preadv(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", record_and_call)
    assert read(files, 3, 1, 2) == [4, 2, 3]
    assert slots_read == [(descriptor, slot) for slot in (1, 2, 3) for descriptor in (files._heads, files._blocks)]


# The C++ code handles only objects of more than 240 bytes, not counting the checksum.
@pytest.mark.parametrize("payload_bytes", [0, 32, 48, 49, 64])
def test_an_object_is_the_same_whether_cpp_takes_its_size_or_not(tmp_path: Path, payload_bytes: int) -> None:
    each = tiny_object(1, payload_bytes)
    data = b"".join(each.pieces())
    sizes = SlotSizes.of(each.num_bytes, payload_bytes)
    for native in (None, native_or_skip()):
        directory = tmp_path / ("python" if native is None else "cpp")
        directory.mkdir()
        files = SlotFiles(directory, sizes, 1, native)
        files.grow()
        files.write_objects([(0, each)])
        for reader in (None, native_or_skip()):
            files._native = reader
            assert files.read([(0, len(data))], [buffer_for(sizes)]) == [(data, data[-16:])]
        files.close()
    first, second = (
        [(directory / name).read_bytes() for name in ("heads", "blocks")] for directory in tmp_path.iterdir()
    )
    assert first == second


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize(
    ("name", "num_left", "num_there"),
    [
        ("blocks", 700, SMALL.head_bytes + 700),
        ("blocks", 0, SMALL.head_bytes),
        ("heads", SMALL.head_bytes + 3, SMALL.head_bytes),
        ("heads", 100, 100),
    ],
)
def test_an_object_in_truncated_files_is_read_without_a_checksum(
    tmp_path: Path, name: str, num_left: int, num_there: int, *, is_native: bool
) -> None:
    files = SlotFiles(tmp_path, SMALL, 2, native_or_skip() if is_native else None)
    files.grow()
    objects = [block(number) for number in range(2)]
    files.write_objects(list(enumerate(objects)))
    os.truncate(tmp_path / name, {"heads": SMALL.head_slot_bytes, "blocks": SMALL.body_slot_bytes}[name] + num_left)
    places = [(slot, objects[slot].num_bytes) for slot in (1, 0)]
    cut, whole = files.read(places, [buffer_for(SMALL) for _ in places])
    assert cut == (object_of(1)[:num_there], None)
    assert whole == (object_of(0), object_of(0)[-16:])
    files.close()


def test_read_ahead_is_advised_for_distant_slots_only(files: SlotFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []

    slot_bytes = {files._heads: SIZES.head_slot_bytes, files._blocks: SIZES.body_slot_bytes}

    def advise(descriptor: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        advised.append((start // slot_bytes[descriptor], size // slot_bytes[descriptor]))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    read(files, 2, 1, 3)
    assert advised == []
    read(files, 6, 0, 1, 3, 4)
    assert advised == [(3, 2), (3, 2), (6, 1), (6, 1)], "first slots and numbers of slots, in both files"


@pytest.mark.parametrize("payload_bytes", [1, 4096, MIB - 1, 2 * MIB, 5 * MIB + 7])
def test_whole_pages_are_written_in_as_few_calls_as_possible(
    payload_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = tiny_object(1, payload_bytes)
    sizes = SlotSizes.of(each.num_bytes, payload_bytes)
    files = SlotFiles(tmp_path, sizes, 2)
    files.grow()
    written: list[tuple[int, int]] = []
    pwritev = os.pwritev

    def record_and_call(descriptor: int, views: Any, position: int) -> int:
        num_written = pwritev(descriptor, views, position)
        written.append((position, num_written))
        return num_written

    monkeypatch.setattr(os, "pwritev", record_and_call)
    files.write_objects([(1, each)])
    assert len(written) == 1 + -(-payload_bytes // (2 * MIB))
    assert all(position % PAGE_BYTES == num_bytes % PAGE_BYTES == 0 for position, num_bytes in written)
    ((found, _),) = files.read([(1, each.num_bytes)], [buffer_for(sizes)])
    assert found == b"".join(each.pieces())
    files.close()


@pytest.mark.parametrize("has_cipher", [False, True])
@pytest.mark.parametrize("is_native", [False, True])
def test_objects_are_read_as_they_were_written(tmp_path: Path, *, is_native: bool, has_cipher: bool) -> None:
    cipher = CIPHER if has_cipher else None
    files = SlotFiles(tmp_path, SMALL, 8, native_or_skip() if is_native else None)
    files.grow()
    objects = [(slot, block(slot, generation=3, protection=cipher)) for slot in (4, 0, 5)]
    files.write_objects(objects)
    buffers = [buffer_for(SMALL) for _ in objects]
    found = files.read([(slot, each.num_bytes) for slot, each in objects], buffers)
    for (data, checksum), (slot, each) in zip(found, objects, strict=True):
        assert checksum == data[-16:]
        assert cipher is not None or data == b"".join(each.pieces())
        assert open_object(data, wanted(slot, cipher), PAYLOAD_BYTES) == payload_of(slot)
    files.close()


def test_lines_of_adjacent_slots_are_written_together(files: SlotFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Line(slot, bytes([slot]) * 32, slot + 1, slot + 2, slot + 3) for slot in (3, 4, 5, 1, 0, 7)]
    written: list[int] = []
    pwrite = os.pwrite

    def record_and_call(descriptor: int, data: bytes, position: int) -> int:
        written.append(len(data) // 64)
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", record_and_call)
    files.write_lines(lines)
    assert written == [3, 1, 1, 1]
    found = files.lines()
    for line in lines:
        row = found[line.slot]
        assert (bytes(row["key"]), *(int(row[name]) for name in ("generation", "serial", "bytes"))) == line[1:]
    assert {slot for slot in range(8) if found["serial"][slot]} == {line.slot for line in lines}
    files.write_lines([])
