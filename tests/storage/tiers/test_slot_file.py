from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.storage.tiers.slot_file import PAGE_BYTES, SlotFile

SLOT_BYTES = (1 << 20) + PAGE_BYTES


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SlotFile]:
    file = SlotFile(tmp_path, SLOT_BYTES, 8)
    while len(file.grow()):
        pass
    yield file
    file.close()


def read(file: SlotFile, *slots: int) -> dict[int, int]:
    """Return the first byte of each slot, in the order in which they came."""
    buffers = [memoryview(bytearray(SLOT_BYTES)) for _ in slots]
    return {slots[index]: data[0] for index, data in file.read([(slot, 100) for slot in slots], buffers)}


def test_objects_come_as_they_are_read(file: SlotFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot in range(4):
        file.write(slot, [bytes([slot + 1] * 100)])
    positions: list[int] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: Any, position: int) -> int:
        positions.append(position // SLOT_BYTES)
        return preadv(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", noted)
    buffers = [memoryview(bytearray(SLOT_BYTES)) for _ in range(3)]
    came = file.read([(3, 100), (1, 100), (2, 100)], buffers)
    assert [(index, data[0], positions[-1]) for index, data in came] == [(1, 2, 1), (2, 3, 2), (0, 4, 3)]


def test_the_disk_is_told_of_strangers_and_not_of_neighbors(file: SlotFile, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    def advise(_: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        told.append((start // SLOT_BYTES, size // SLOT_BYTES))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    assert list(read(file, 2, 1, 3)) == [1, 2, 3]
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
    ((_, found),) = file.read([(1, len(data))], [buffer])
    assert found == data
    file.close()
