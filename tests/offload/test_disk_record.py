"""The next process finds the blocks on the disk with their namespaces, and deletes blocks of unknown namespaces."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

import pytest

from radixkv.errors import StoreUnavailable
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from radixkv.offload import disk_record
from radixkv.offload.block_keys import BlockKeys, PromptKeys
from radixkv.offload.disk_record import DiskRecord, FoundOnDisk
from radixkv.offload.index.namespace_keys import NamespaceKeys
from radixkv.offload.index.retention import RetentionHint
from radixkv.offload.restart import DiskScan, ShutdownSave
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.disk import DiskStore
from tests.fake_runner import tokens
from tests.patience import PATIENCE_S

from .tiered_bench import FORMAT, OBJECT_BYTES, PAYLOAD_BYTES, TieredBench

KEYS = BlockKeys(FORMAT)
ACME = Namespace("model", "acme")
OTHER = Namespace("model", "other", salt="s")


def disk_at(path: Path) -> DiskStore:
    return DiskStore(path, FORMAT, OBJECT_BYTES, 1 << 20)


def blocks_of(namespace: Namespace, ids: range) -> list[BlockObject]:
    blocks = PromptKeys(KEYS, InvocationMarks()).blocks(namespace, tokens(ids))
    return [BlockObject(each.key, each.parent, 0, each.tokens, memoryview(bytes(PAYLOAD_BYTES))) for each in blocks]


def store(path: Path, blocks: Sequence[BlockObject], noted: Sequence[Namespace]) -> None:
    """Run a process that records the namespaces `noted`, stores blocks, and ends."""
    disk = disk_at(path)
    record = DiskRecord(disk, KEYS)
    for namespace in noted:
        record.note(namespace)
    disk.put(blocks)
    disk.close()


def read(path: Path) -> tuple[Sequence[tuple[bytes, Namespace]], int | None]:
    """Return what a new process finds, and the number of blocks that the disk holds afterwards."""
    disk = disk_at(path)
    found, _ = DiskRecord(disk, KEYS).read()
    num_blocks = disk.size().num_objects
    disk.close()
    return found, num_blocks


def test_blocks_are_found_with_their_owners_in_eviction_order(tmp_path: Path) -> None:
    ours = blocks_of(ACME, range(12))
    theirs = blocks_of(OTHER, range(8))
    written = [ours[2], theirs[1], theirs[0], ours[1], ours[0]]
    store(tmp_path, written, [ACME, OTHER])
    owners = {each.key: ACME for each in ours} | {each.key: OTHER for each in theirs}
    assert read(tmp_path) == ([(each.key, owners[each.key]) for each in written], 5)


def test_blocks_of_unknown_namespaces_are_deleted(tmp_path: Path) -> None:
    ours = blocks_of(ACME, range(12))
    theirs = blocks_of(OTHER, range(8))
    store(tmp_path, [*ours, *theirs], [ACME])
    assert read(tmp_path) == ([(each.key, ACME) for each in ours], 3)


def test_a_block_is_found_even_if_the_blocks_before_it_are_gone(tmp_path: Path) -> None:
    """The end of a prompt is evicted to the disk before its beginning, which is lost if the process is killed."""
    ours = blocks_of(ACME, range(12))
    store(tmp_path, ours[1:], [ACME])
    assert read(tmp_path) == ([(each.key, ACME) for each in ours[1:]], 2)


def test_blocks_of_invoked_adapters_are_found(tmp_path: Path) -> None:
    first, second = blocks_of(ACME, range(8))
    invoked = ACME._replace(adapter="digest")
    key = KEYS.child(KEYS.with_tags_of(first.key, invoked), second.tokens + b"content")
    store(tmp_path, [first, second._replace(key=key)], [ACME, invoked])
    assert read(tmp_path) == ([(first.key, ACME), (key, invoked)], 2)


def test_blocks_of_namespaces_with_equal_tags_are_deleted(tmp_path: Path) -> None:
    """A namespace of another model has the same tags."""
    blocks = blocks_of(ACME, range(8))
    store(tmp_path, [*blocks, *blocks_of(OTHER, range(8))], [ACME, ACME._replace(model="another"), OTHER, OTHER])
    assert read(tmp_path) == ([(each.key, OTHER) for each in blocks_of(OTHER, range(8))], 2)


def test_blocks_stored_with_another_secret_are_deleted(tmp_path: Path) -> None:
    store(tmp_path, blocks_of(ACME, range(8)), [ACME])
    disk = disk_at(tmp_path)
    assert DiskRecord(disk, BlockKeys(FORMAT, b"another")).read() == ([], [])
    assert disk.size().num_objects == 0
    disk.close()


def test_the_next_process_finds_blocks_in_the_recorded_order(tmp_path: Path) -> None:
    first, second, third = blocks_of(ACME, range(12))
    disk = disk_at(tmp_path)
    record = DiskRecord(disk, KEYS)
    record.note(ACME)
    disk.put([first, second, third])
    record.persist_order([second.key, first.key])
    disk.close()
    assert [key for key, _ in read(tmp_path)[0]] == [third.key, second.key, first.key]


def test_priorities_expire_at_the_same_unix_time_in_the_next_process(tmp_path: Path) -> None:
    hints = [
        (b"a" * 32, RetentionHint(80, None)),
        (b"b" * 32, RetentionHint(10, 1060.0)),  # of the clock of the first process, which is the Unix time 5060
        (b"c" * 32, RetentionHint(90, 1030.0)),  # the Unix time 5030
    ]
    disk = disk_at(tmp_path)
    DiskRecord(disk, KEYS, clock=lambda: 1000.0, unix_time=lambda: 5000.0).persist_priorities(hints)
    disk.close()

    # At the Unix time 5040, the hint of `c` has expired. That of `b` expires 20 seconds later.
    for expected in ([hints[0], (b"b" * 32, RetentionHint(10, 27.0))], []):  # the second process saves no priorities
        disk = disk_at(tmp_path)
        record = DiskRecord(disk, KEYS, clock=lambda: 7.0, unix_time=lambda: 5040.0)
        assert record.read().hints == expected
        disk.close()


def test_invalid_priorities_are_ignored(tmp_path: Path) -> None:
    disk = disk_at(tmp_path)
    lines = [(b"a" * 32, math.inf, 101), (b"b" * 32, math.nan, 80)]
    (disk.path / "priorities").write_bytes(b"".join(Struct("<32sdB7x").pack(*line) for line in lines))
    assert DiskRecord(disk, KEYS).read().hints == []
    disk.close()


def test_priorities_are_lost_if_the_disk_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = disk_at(tmp_path)
    (tmp_path / FORMAT.fingerprint / "priorities").mkdir()
    record = DiskRecord(disk, KEYS)
    record.persist_priorities([(b"a" * 32, RetentionHint(80, None))])
    assert "tier disk: writing 1 priorities failed: " in caplog.text
    assert record.read().hints == []
    assert "tier disk: reading the priorities failed: " in caplog.text
    disk.close()


def test_an_empty_disk_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], 0)


@pytest.mark.parametrize("noted", [[], [OTHER]])
def test_without_the_name_of_their_namespace_no_blocks_are_found(noted: list[Namespace], tmp_path: Path) -> None:
    store(tmp_path, blocks_of(ACME, range(8)), noted)
    assert read(tmp_path) == ([], 0)


def test_blocks_are_found_although_others_can_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = blocks_of(ACME, range(12))
    theirs = blocks_of(OTHER, range(8))
    store(tmp_path, [*ours, *theirs], [ACME])
    disk = disk_at(tmp_path)
    monkeypatch.setattr(disk, "delete", _fail)
    assert DiskRecord(disk, KEYS).read().blocks == [(each.key, ACME) for each in ours]
    assert "tier disk: deleting 2 blocks of unknown namespaces failed: gone" in caplog.text
    disk.close()


def _fail(_: Sequence[bytes]) -> int:
    raise StoreUnavailable("gone")


def test_namespaces_without_blocks_are_forgotten_when_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_record, "_MIN_UNUSED_NAMESPACES", 10)
    disk = disk_at(tmp_path)
    owned = NamespaceKeys()
    record = DiskRecord(disk, KEYS)
    for number in range(100):
        record.note(ACME._replace(salt=str(number)))
        owned.add(bytes([number]) * 32, ACME._replace(salt=str(number)))
        if number > 4:
            owned.remove(bytes([number - 1]) * 32)
        record.tidy(owned)
        assert len(disk.namespaces) <= 2 * 5 + 10, "at most five namespaces have blocks"
    owned_by_root = {KEYS.root(namespace): namespace for namespace in owned}
    assert owned_by_root.items() <= disk.namespaces.by_root().items()
    disk.put([])
    disk.close()
    again = disk_at(tmp_path)
    assert again.namespaces.by_root().keys() >= owned_by_root.keys()
    again.close()


def test_blocks_stored_during_the_scan_are_not_blocks_of_an_earlier_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, blocks_of(ACME, range(8)), [ACME])
    disk = disk_at(tmp_path)
    record = DiskRecord(disk, KEYS)
    real_by_root = disk.namespaces.by_root

    def list_and_store() -> dict[bytes, Namespace]:
        names = real_by_root()
        record.note(OTHER)
        disk.put(blocks_of(OTHER, range(8)))
        return names

    monkeypatch.setattr(disk.namespaces, "by_root", list_and_store)
    assert len(record.read().blocks) == 2
    assert disk.size().num_objects == 4
    disk.close()


def test_retention_survives_a_process_that_ends_during_its_scan(tmp_path: Path) -> None:
    ours = blocks_of(ACME, range(12))
    may_read = threading.Event()
    store(tmp_path, ours, [ACME])
    disk = disk_at(tmp_path)
    DiskRecord(disk, KEYS).persist_priorities([(each.key, RetentionHint(90, None)) for each in ours])
    disk.close()

    class SlowRecord(DiskRecord):
        def read(self) -> FoundOnDisk:
            assert may_read.wait(PATIENCE_S)
            return super().read()

    disk = disk_at(tmp_path)
    record = SlowRecord(disk, KEYS)
    bench = TieredBench(disk=8)
    offload = bench.offload
    tier_index = bench.index.tiers["disk"]
    offload._disk_scan = DiskScan(record, tier_index, bench.index.retention, lambda keys: None)
    offload._shutdown_save = ShutdownSave(bench.cache, bench.index, offload._saver, record)
    threading.Timer(0.05, may_read.set).start()
    offload.close()
    disk.close()
    disk = disk_at(tmp_path)
    assert sorted(DiskRecord(disk, KEYS).read().hints) == sorted((each.key, RetentionHint(90, None)) for each in ours)
    disk.close()


HINTS = [(bytes(32), RetentionHint(100, None)), (b"\xff" * 32, RetentionHint(0, 1234.5))]


def test_priorities_are_read_once(tmp_path: Path) -> None:
    disk = disk_at(tmp_path)
    record = DiskRecord(disk, KEYS, clock=lambda: 1000.0, unix_time=lambda: 5000.0)
    record.persist_priorities(HINTS[1:])
    record.persist_priorities(HINTS)
    assert record.read().hints == HINTS
    assert not (disk.path / "priorities").exists()
    assert record.read().hints == []
    disk.close()


def test_only_the_user_can_read_the_priority_file(tmp_path: Path) -> None:
    disk = disk_at(tmp_path)
    record = DiskRecord(disk, KEYS)
    record.persist_priorities([])
    assert (disk.path / "priorities").stat().st_mode & 0o777 == 0o600
    assert record.read().hints == []
    disk.close()


def test_a_truncated_priority_file_has_no_priorities(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = disk_at(tmp_path)
    record = DiskRecord(disk, KEYS)
    record.persist_priorities(HINTS)
    path = disk.path / "priorities"
    path.write_bytes(path.read_bytes()[:-1])
    assert record.read().hints == []
    assert "expected whole lines, got 95 bytes" in caplog.text, "two lines of 48 bytes, without the last byte"
    assert not path.exists()
    disk.close()
