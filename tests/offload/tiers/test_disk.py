from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from radixkv.errors import StoreUnavailable
from radixkv.namespace import Namespace
from radixkv.offload.tiers import slot_files
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import PutOutcome
from radixkv.offload.tiers.disk import DiskStore
from radixkv.offload.tiers.namespace_file import NamespaceFile
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S

from .blocks import FORMAT, OBJECT_BYTES, ROOT, block, key_of, object_of, read_from, tokens_of
from .damage import kill_writers, open_damaged_objects, read_damaged_files
from .disks import PAGE_BYTES, SLOT_BYTES, disk_at


def directory_of(path: Path) -> Path:
    """Return the directory of the only format in a disk tier."""
    (directory,) = path.iterdir()
    return directory


def file_sizes_of(path: Path) -> list[int]:
    """Return the bytes of the two files with objects."""
    return [(directory_of(path) / name).stat().st_size for name in ("heads", "blocks")]


class PowerFailures:
    """Simulates power failures, after which the index on the disk is as it was at the last sync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self._path = path
        self._sync = os.fdatasync
        self._synced = b""
        monkeypatch.setattr(os, "fdatasync", self._sync_and_record)

    @property
    def index(self) -> Path:
        return directory_of(self._path) / "index"

    def _sync_and_record(self, file: int) -> None:
        self._sync(file)
        self._synced = self.index.read_bytes()

    def fail(self, store: DiskStore, first_lines: bytes = b"") -> None:
        """Close a store and lose writes that were not synced, except the given index lines, if any."""
        index = self.index.read_bytes() if first_lines else self._synced
        store.close()
        self.index.write_bytes(first_lines + index[len(first_lines) :])


def test_the_next_process_finds_what_was_written(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(number) for number in range(5)])
    store.delete([key_of(2)])
    store.close()
    store.close()
    again = disk_at(tmp_path, 8)
    assert read_from(again, 0, 1, 2, 3, 4) == [object_of(0), object_of(1), None, object_of(3), object_of(4)]
    assert again.size().num_objects == 4
    again.close()


def test_the_next_process_evicts_in_the_order_of_the_writes(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 3)
    store.put([block(number) for number in (1, 2, 3)])
    store.put([block(4)])  # into the slot of 1
    store.close()
    again = disk_at(tmp_path, 3)
    assert again.put([block(5)]).evicted == (key_of(2),)
    again.close()


def test_a_deleted_block_does_not_reappear_in_an_earlier_generation(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(1, generation=1)])
    entry = store._table.find(key_of(1))
    assert entry is not None
    store._table.start_reading(entry)  # so that the next generation is written to another slot
    store.put([block(1, generation=2)])
    store._table.end_reading(entry)
    store.delete([key_of(1)])
    store.close()
    again = disk_at(tmp_path, 8)
    assert again.exists([key_of(1)]) == [False]
    again.close()


def test_a_deleted_block_does_not_reappear_after_a_power_failure_left_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    power = PowerFailures(monkeypatch, tmp_path)
    store = disk_at(tmp_path, 8)
    store.put([block(1, generation=1)])
    first_line = power.index.read_bytes()[:64]
    entry = store._table.find(key_of(1))
    assert entry is not None
    store._table.start_reading(entry)  # so that the next generation is written to another slot
    store.put([block(1, generation=2)])
    power.fail(store, first_lines=first_line)
    store = disk_at(tmp_path, 8)
    assert read_from(store, 1) == [object_of(1, 2)]
    assert store.delete([key_of(1)]) == 1
    power.fail(store)
    store = disk_at(tmp_path, 8)
    assert store.exists([key_of(1)]) == [False]
    store.close()


def test_an_evicted_block_does_not_reappear_after_its_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_at(tmp_path, 1).close()
    power = PowerFailures(monkeypatch, tmp_path)
    store = disk_at(tmp_path, 1)
    store.put([block(1)])
    store.delete([])
    assert store.put([block(2)]).evicted == (key_of(1),)
    assert store.delete([key_of(1)]) == 0
    power.fail(store)
    store = disk_at(tmp_path, 1)
    assert store.exists([key_of(1)]) == [False]
    store.close()


def test_the_files_have_the_size_of_the_bound_and_shrink_with_it(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(number) for number in range(20)])
    assert file_sizes_of(tmp_path) == [8 * PAGE_BYTES] * 2
    assert store.size().used_bytes == store.size().capacity_bytes == 8 * SLOT_BYTES
    store.close()
    smaller = disk_at(tmp_path, 3)
    assert file_sizes_of(tmp_path) == [3 * PAGE_BYTES] * 2
    assert smaller.size().num_objects == 3
    assert set(read_from(smaller, *range(20))) <= {None, *(object_of(number) for number in range(20))}
    smaller.close()


def test_adjacent_and_distant_slots_are_read_in_one_batch(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 200)
    store.put([block(number) for number in range(150)])
    numbers = [*range(10), 149, 70, 71, 20, *range(100, 30, -1)]
    assert read_from(store, *numbers) == [object_of(number) for number in numbers]
    store.close()


def test_a_buffer_is_reused_only_after_its_loan(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(1), block(2), block(3)])
    first, second = store.get([key_of(1), key_of(2)])
    assert first is not None
    assert second is not None
    memory = first.data.obj
    first.release()
    (third,) = store.get([key_of(3)])
    assert third is not None
    assert third.data.obj is memory
    assert (second.data, third.data) == (object_of(2), object_of(3))
    store.close()


def test_keys_are_listed_in_eviction_order(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(number) for number in (2, 1, 3)])
    read_from(store, 1)  # which is a use
    assert list(store) == [key_of(2), key_of(3), key_of(1)]
    store.close()


def test_the_next_process_evicts_in_lru_order(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 3)
    store.put([block(number) for number in (1, 2, 3)])
    read_from(store, 1)
    store.close()
    again = disk_at(tmp_path, 3)
    assert again.put([block(4), block(5)]).evicted == (key_of(2), key_of(3))
    again.close()


def test_the_next_process_evicts_in_the_persisted_order(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 4)
    store.put([block(number) for number in (1, 2, 3, 4)])
    store.persist_order([key_of(number) for number in (9, 3, 1, 2)])
    store.delete([key_of(1)])
    store.close()
    again = disk_at(tmp_path, 4)
    assert list(again) == [key_of(4), key_of(3), key_of(2)]
    again.put([block(5), block(6)])
    again.close()
    third = disk_at(tmp_path, 4)
    assert list(third) == [key_of(3), key_of(2), key_of(5), key_of(6)], (
        "blocks that are written later are evicted later"
    )
    assert read_from(third, 2, 3, 5) == [object_of(2), object_of(3), object_of(5)]
    third.close()


def test_a_disk_that_fails_on_close_keeps_its_order_and_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(1), block(2)])
    store.persist_order([key_of(2), key_of(1)])

    def fail(slots: object, first_serial: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(store._files, "number_lines", fail)
        with pytest.raises(StoreUnavailable, match=r"tiers.disk_path: access to .* failed: Input/output error"):
            store.close()
    again = disk_at(tmp_path, 8)
    assert list(again) == [key_of(1), key_of(2)]
    again.close()


def test_a_second_process_is_refused_until_the_first_one_closes_the_store(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 8)
    code = f"from tests.offload.tiers.disks import disk_at, Path\ndisk_at(Path({str(tmp_path)!r}), 8).close()"
    command = [sys.executable, "-c", code]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert refused.returncode == 1
    assert "StoreUnavailable" in refused.stderr
    assert "another process uses this directory" in refused.stderr
    store.close()
    subprocess.run(command, check=True, timeout=PATIENCE_S)


def test_another_model_has_another_directory(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(1)])
    other = DiskStore(tmp_path, dataclasses.replace(FORMAT, model="other"), OBJECT_BYTES, 8 * SLOT_BYTES)
    assert other.exists([key_of(1)]) == [False]
    other.close()
    store.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_was_moved_here_from_another_model_is_refused(tmp_path: Path) -> None:
    disk_at(tmp_path, 8).close()
    other = dataclasses.replace(FORMAT, model="other")
    directory_of(tmp_path).rename(tmp_path / other.fingerprint)
    with pytest.raises(StoreUnavailable, match=r"format.json: expected this model's format, got another"):
        DiskStore(tmp_path, other, OBJECT_BYTES, 8 * SLOT_BYTES)
    (tmp_path / other.fingerprint / "format.json").write_text("{")
    with pytest.raises(StoreUnavailable, match="got something unreadable"):
        DiskStore(tmp_path, other, OBJECT_BYTES, 8 * SLOT_BYTES)


@pytest.mark.parametrize("name", ["heads", "format.json", "namespaces", "lock", "index.partial"])
@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/null"), os.mkfifo], ids=["link", "pipe"])
def test_links_and_pipes_in_the_directory_are_refused(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    """A process that can write to the directory could make the server write to its own other files, or wait forever."""
    disk_at(tmp_path, 9).close()
    (directory_of(tmp_path) / name).unlink(missing_ok=True)
    make(directory_of(tmp_path) / name)
    with pytest.raises(StoreUnavailable, match="expected a directory of regular files only, got"):
        disk_at(tmp_path, 9)


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    disk_at(tmp_path / "disk", 9).close()
    own = directory_of(tmp_path / "disk")
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable, match="expected a directory of regular files only, got"):
        disk_at(tmp_path / "disk", 9)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": ' + "9" * 10_000 + "}"])
def test_a_hostile_label_or_namespace_is_refused_or_skipped(tmp_path: Path, text: str) -> None:
    disk_at(tmp_path, 9).close()
    with (directory_of(tmp_path) / "namespaces").open("a") as file:
        file.write(text + "\n")
    disk_at(tmp_path, 9).close()
    (directory_of(tmp_path) / "format.json").write_text(text)
    with pytest.raises(StoreUnavailable, match="got something unreadable"):
        disk_at(tmp_path, 9)


def test_a_label_says_what_a_directory_holds(tmp_path: Path) -> None:
    disk_at(tmp_path, 8).close()
    label = json.loads((directory_of(tmp_path) / "format.json").read_text())
    assert (label["model"], label["block_size"]) == ("model", 16)
    assert directory_of(tmp_path).stat().st_mode & 0o77 == 0
    assert all((directory_of(tmp_path) / name).stat().st_mode & 0o77 == 0 for name in ("heads", "blocks"))


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailable, match=r"tiers.disk_path: expected a directory to write to, got .*file"):
        disk_at(tmp_path / "file", 8)


def test_a_bound_smaller_than_one_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"tiers.disk_bytes: expected at least 8192, got 8191"):
        DiskStore(tmp_path, FORMAT, OBJECT_BYTES, 8191)


def test_without_a_bound_the_store_takes_half_of_the_free_space(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "new", FORMAT, OBJECT_BYTES, None)
    free_bytes = shutil.disk_usage(tmp_path).free
    assert store.size().capacity_bytes == pytest.approx(free_bytes / 2, rel=0.1)
    store.close()


def test_an_error_about_space_names_the_path_if_no_bound_is_set() -> None:
    message = r"^tiers\.disk_path: expected at least 16384 free bytes, half of them for blocks, got less: /proc/nope$"
    with pytest.raises(StoreUnavailable, match=message):
        DiskStore(Path("/proc/nope"), FORMAT, OBJECT_BYTES, None)


def test_an_object_that_fits_no_slot_is_refused(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 2)
    large = block(1)._replace(payload=memoryview(bytes(5000)))
    without_tokens = block(3)._replace(tokens=b"", payload=memoryview(b""))
    outcomes = store.put([large, block(2), without_tokens]).outcomes
    assert outcomes == (PutOutcome.TOO_LARGE, PutOutcome.STORED, PutOutcome.TOO_LARGE)
    store.close()


@pytest.fixture
def disk_with_room_for_six_objects() -> Iterator[None]:
    """Limit files to six slots, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * PAGE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("disk_with_room_for_six_objects")
def test_a_store_on_a_full_disk_uses_the_slots_that_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    store = DiskStore(tmp_path, FORMAT, OBJECT_BYTES, 64 * SLOT_BYTES, clock)
    for number in range(20):
        assert store.put([block(number)]).outcomes == (PutOutcome.STORED,)
    assert store.size().num_objects == 6
    assert read_from(store, *range(14, 20)) == [object_of(number) for number in range(14, 20)]
    assert caplog.text.count("the disk is full") == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    store.put([block(30)])
    assert store.size().num_objects == 6, "the store tries to grow at most once per minute"
    clock.now_s += 60
    assert store.put([block(31), block(32)]).evicted == ()
    assert store.size().num_objects == 8
    store.close()


def test_a_disk_without_any_room_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk_at(tmp_path, 8)

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert store.put([block(1)]).outcomes == (PutOutcome.NO_ROOM,)
    assert store.exists([key_of(1)]) == [False]
    store.close()


def test_a_failing_disk_raises_and_leaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk_at(tmp_path, 2)
    store.put([block(1)])

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for call in ("pwritev", "preadv"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fails)
            with pytest.raises(StoreUnavailable, match=r"tiers.disk_path: access to .* failed: Input/output error"):
                _ = store.put([block(2)]) if call == "pwritev" else store.get([key_of(1)])
    with monkeypatch.context() as patched:
        patched.setattr(store._files, "read", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            store.get([key_of(1)])
    assert len(store._buffers._idle) == 1, "both failed loads gave back the same buffer"
    assert store.exists([key_of(1), key_of(2)]) == [True, False]
    assert store.put([block(2), block(3)]).evicted == (key_of(1),)
    store.close()


def test_no_block_is_written_before_the_name_of_its_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk_at(tmp_path, 4)
    store.namespaces.add(ROOT, Namespace("model", "acme"))
    with monkeypatch.context() as patched:
        patched.setattr(store.namespaces, "_append", raise_no_space)
        with pytest.raises(StoreUnavailable, match=r"tiers.disk_path: access to .* failed: No space left"):
            store.put([block(1)])
    assert store.exists([key_of(1)]) == [False]
    assert store.put([block(1)]).outcomes == (PutOutcome.STORED,)
    store.close()
    again = disk_at(tmp_path, 4)
    assert again.namespaces.by_root() == {ROOT: Namespace("model", "acme")}
    again.close()


def raise_no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("slow_call", ["fdatasync", "posix_fallocate"])
def test_loads_do_not_wait_for_slow_calls_of_writers(
    slow_call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_files, "_GROWTH_BYTES", 4 * SLOT_BYTES)
    store = disk_at(tmp_path, 8)
    store.put([block(number) for number in range(4)])
    loaded = []
    real_call = getattr(os, slow_call)

    def load_and_call(*arguments: int) -> None:
        reader = threading.Thread(target=lambda: loaded.append(read_from(store, 1)), daemon=True)
        reader.start()
        reader.join(PATIENCE_S)
        real_call(*arguments)

    monkeypatch.setattr(os, slow_call, load_and_call)
    assert store.delete([key_of(0)]) == 1
    store.put([block(4), block(5)])
    assert loaded
    assert all(each == [object_of(1)] for each in loaded)
    store.close()


def test_a_load_that_runs_out_of_memory_releases_its_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk_at(tmp_path, 1)
    store.put([block(1)])
    with monkeypatch.context() as patched:
        patched.setattr(store._buffers, "take", raise_memory_error)
        with pytest.raises(MemoryError):
            store.get([key_of(1)])
    assert store.put([block(2)]).outcomes == (PutOutcome.STORED,)
    store.close()


def raise_memory_error() -> memoryview:
    raise MemoryError


def test_a_store_that_fails_to_open_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(NamespaceFile, "__init__", raise_no_space)
    with pytest.raises(StoreUnavailable, match="No space left"):
        disk_at(tmp_path, 4)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_writes_that_end_early_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    preadv = os.preadv

    def write_100_bytes(file: int, buffers: Sequence[memoryview], position: int) -> int:
        first_buffer = next(filter(len, buffers))
        return pwritev(file, [first_buffer[:100]], position)

    def read_100_bytes(file: int, buffers: Sequence[memoryview], position: int) -> int:
        return preadv(file, [buffers[0][:100]], position)

    monkeypatch.setattr(os, "pwritev", write_100_bytes)
    monkeypatch.setattr(os, "preadv", read_100_bytes)
    store = disk_at(tmp_path, 4)
    store.put([block(1), block(2)])
    assert read_from(store, 1, 2) == [object_of(1), object_of(2)]
    store.close()


def test_a_batch_larger_than_the_store_leaves_its_last_objects(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 4)
    result = store.put([block(number) for number in range(10)])
    assert set(result.outcomes) == {PutOutcome.STORED}
    assert result.evicted == tuple(key_of(number) for number in range(6))
    assert read_from(store, *range(10)) == [None] * 6 + [object_of(number) for number in range(6, 10)]
    store.close()


def test_of_equal_keys_in_a_batch_the_latest_generation_is_kept(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(8), block(9)])
    generations = (1, 2, 2, 1)
    outcomes = store.put([block(0), *(block(1, generation) for generation in generations), block(2)]).outcomes
    new = PutOutcome.STORED
    known = PutOutcome.ALREADY_THERE
    assert outcomes == (new, new, new, known, known, new)
    store.close()
    again = disk_at(tmp_path, 8)
    assert read_from(again, 0, 1, 2, 8, 9) == [object_of(0), object_of(1, 2), object_of(2), object_of(8), object_of(9)]
    again.close()


def test_an_object_deleted_during_its_write_is_gone_and_its_slot_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(0)])
    write = store._files.write_objects

    def write_and_delete(objects: Sequence[tuple[int, BlockObject]]) -> None:
        write(objects)
        store.delete([key_of(2)])

    with monkeypatch.context() as patched:
        patched.setattr(store._files, "write_objects", write_and_delete)
        store.put([block(number) for number in (1, 2, 3)])
    assert read_from(store, 0, 1, 2, 3) == [object_of(0), object_of(1), None, object_of(3)]
    store.close()
    again = disk_at(tmp_path, 8)
    assert again.exists([key_of(number) for number in range(4)]) == [True, True, False, True]
    assert again.put([block(number) for number in range(4, 9)]).evicted == ()
    again.close()


def test_a_batch_that_fails_leaves_all_of_its_slots_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk_at(tmp_path, 8)
    store.put([block(0), block(1)])
    with monkeypatch.context() as patched:
        patched.setattr(store._files, "write_objects", raise_no_space)
        with pytest.raises(StoreUnavailable, match="No space left"):
            store.put([block(number) for number in (2, 3, 4)])
    assert store.exists([key_of(number) for number in range(5)]) == [True, True, False, False, False]
    assert store.put([block(number) for number in range(2, 8)]).evicted == ()
    store.close()


def test_an_object_that_fails_to_serialize_leaves_its_slot_free(tmp_path: Path) -> None:
    store = disk_at(tmp_path, 1)
    broken = BlockObject(None, ROOT, 0, tokens_of(1), memoryview(b""))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="must be a bytes object"):
        store.put([broken])
    assert store.put([block(2)]).outcomes == (PutOutcome.STORED,)
    store.close()


def test_no_damaged_object_is_served() -> None:
    counts = open_damaged_objects(2_000, seed=1)
    assert counts["served"] == 0
    assert counts.total() == 2_000
    assert {"cut", "foreign", "damaged"} <= set(counts)


def test_no_damaged_file_leads_to_a_wrong_block() -> None:
    counts = read_damaged_files(60, seed=1)
    assert counts["wrong"] == 0
    assert counts["right"] > 60
    assert counts["damaged"] > 0
    assert counts["foreign"] > 0


def test_killed_writers_leave_no_wrong_block() -> None:
    counts = kill_writers(20, seed=1)
    assert (counts["wrong"], counts["restarts"]) == (0, 20)
    assert counts["right"] > 0


@pytest.mark.slow
def test_a_hundred_thousand_damages_and_many_kills_lead_to_no_wrong_block() -> None:
    assert open_damaged_objects(100_000, seed=2)["served"] == 0
    assert read_damaged_files(1_000, seed=2)["wrong"] == 0
    assert kill_writers(200, seed=2)["wrong"] == 0
