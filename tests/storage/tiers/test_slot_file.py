from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_digest

from radixkv.storage.tiers.block_object import open_object
from radixkv.storage.tiers.sealing import BlockCipher
from radixkv.storage.tiers.slot_file import PAGE_BYTES, Line, SlotFile

from .backends import native_or_skip
from .blocks import PAYLOAD_BYTES, block, payload_of, wanted

SLOT_BYTES = (1 << 20) + PAGE_BYTES
CIPHER = BlockCipher(bytes(range(32)))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SlotFile]:
    file = SlotFile(tmp_path, SLOT_BYTES, 8)
    while len(file.grow()):
        pass
    yield file
    file.close()


def read(file: SlotFile, *slots: int) -> list[int]:
    """Return the first byte of each slot."""
    buffers = [memoryview(bytearray(SLOT_BYTES)) for _ in slots]
    return [data[0] for data, _ in file.read([(slot, 100) for slot in slots], buffers)]


def test_objects_are_read_in_the_order_of_the_disk_and_come_as_they_were_asked_for(
    file: SlotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in range(4):
        file.write(slot, [bytes([slot + 1] * 100)])
    positions: list[int] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: Any, position: int) -> int:
        positions.append(position // SLOT_BYTES)
        return preadv(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", noted)
    assert read(file, 3, 1, 2) == [4, 2, 3]
    assert positions == [1, 2, 3]


@pytest.mark.parametrize("size", [256, 257])  # C++ reads more than 256 bytes
def test_an_object_is_the_same_whether_cpp_takes_its_size_or_not(tmp_path: Path, size: int) -> None:
    file = SlotFile(tmp_path, PAGE_BYTES, 1, native_or_skip())
    file.grow()
    data = bytes(range(256)) + bytes(size - 256)
    file.write(0, [data])
    assert file.read([(0, size)], [memoryview(mmap.mmap(-1, PAGE_BYTES))]) == [(data, xxh3_128_digest(data[:-16]))]
    file.close()


@pytest.mark.parametrize("is_native", [False, True])
def test_a_cut_object_has_no_checksum(tmp_path: Path, *, is_native: bool) -> None:
    file = SlotFile(tmp_path, PAGE_BYTES, 2, native_or_skip() if is_native else None)
    file.grow()
    objects = [bytes([number + 1] * 1000) for number in range(2)]
    for slot, each in enumerate(objects):
        file.write(slot, [each])
    os.truncate(tmp_path / "blocks", PAGE_BYTES + 700)
    buffers = [memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in objects]
    cut, whole = file.read([(1, 1000), (0, 1000)], buffers)
    assert cut == (objects[1][:700], None)
    assert whole == (objects[0], xxh3_128_digest(objects[0][:-16]))
    file.close()


def test_the_disk_is_told_of_strangers_and_not_of_neighbors(file: SlotFile, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    def advise(_: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        told.append((start // SLOT_BYTES, size // SLOT_BYTES))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    read(file, 2, 1, 3)
    assert told == []
    read(file, 6, 0, 1, 3, 4)
    assert told == [(3, 2), (6, 1)]


@pytest.mark.parametrize("sizes", [(100,), (100, 1 << 20, 16), (384, PAGE_BYTES - 384), (1 << 20, 1 << 20, 1 << 20, 5)])
def test_whole_pages_are_written_in_as_few_calls_as_possible(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot_bytes = 4 << 20
    file = SlotFile(tmp_path, slot_bytes, 2)
    file.grow()
    written: list[tuple[int, int]] = []
    pwritev = os.pwritev

    def noted(descriptor: int, views: Any, position: int) -> int:
        written.append((position, count := pwritev(descriptor, views, position)))
        return count

    monkeypatch.setattr(os, "pwritev", noted)
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    file.write(1, iter(pieces))
    data = b"".join(pieces)
    assert len(written) == 1 + len(data) // (2 << 20)
    assert all(position % PAGE_BYTES == count % PAGE_BYTES == 0 for position, count in written)
    buffer = memoryview(bytearray(slot_bytes))
    ((found, _),) = file.read([(1, len(data))], [buffer])
    assert found == data
    file.close()


@pytest.mark.parametrize("has_cipher", [False, True])
@pytest.mark.parametrize("is_native", [False, True])
def test_objects_are_those_that_their_pieces_make(tmp_path: Path, *, is_native: bool, has_cipher: bool) -> None:
    cipher = CIPHER if has_cipher else None
    file = SlotFile(tmp_path, PAGE_BYTES, 8, native_or_skip() if is_native else None)
    file.grow()
    objects = [(slot, block(slot, generation=3, cipher=cipher)) for slot in (4, 0, 5)]
    file.write_objects(objects)
    buffers = [memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in objects]
    found = file.read([(slot, each.num_bytes) for slot, each in objects], buffers)
    for (data, checksum), (slot, each) in zip(found, objects, strict=True):
        assert checksum == data[-16:]
        assert cipher is not None or data == b"".join(each.pieces())
        assert open_object(data, wanted(slot, cipher), PAYLOAD_BYTES) == payload_of(slot)
    file.close()


def test_lines_of_neighbors_are_written_together(file: SlotFile, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Line(slot, bytes([slot]) * 32, slot + 1, slot + 2, slot + 3) for slot in (3, 4, 5, 1, 0, 7)]
    written: list[int] = []
    pwrite = os.pwrite

    def noted(descriptor: int, data: bytes, position: int) -> int:
        written.append(len(data) // 64)
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", noted)
    file.write_lines(lines)
    assert written == [3, 1, 1, 1]
    found = file.lines()
    for line in lines:
        row = found[line.slot]
        assert (bytes(row["key"]), *(int(row[name]) for name in ("generation", "serial", "bytes"))) == line[1:]
    assert {slot for slot in range(8) if found["serial"][slot]} == {line.slot for line in lines}
    file.write_lines([])
