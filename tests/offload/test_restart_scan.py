"""The blocks on the disk are added to the index by a scan; a failed scan adds none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.errors import StoreUnavailable
from radixkv.namespace import Namespace
from radixkv.offload import restart
from radixkv.offload.disk_record import FoundOnDisk
from radixkv.offload.index.namespace_keys import NamespaceKeys
from radixkv.offload.index.retention import RetentionHint, StoredRetention
from radixkv.offload.index.tier_index import TierIndex
from radixkv.offload.restart import DiskScan
from tests.patience import PATIENCE_S

ACME = Namespace("model", "acme")


class FakeRecord:
    """Fakes a `DiskRecord`, whose `read` returns two blocks when the test says so."""

    def __init__(self, error: Exception | None = None, *, has_hints: bool = False) -> None:
        self.may_answer = threading.Event()
        self.deleted: list[bytes] = []
        self.tidied: list[list[Namespace]] = []
        self._error = error
        self._has_hints = has_hints

    def tidy(self, stored: NamespaceKeys) -> None:
        self.tidied.append(list(stored))

    def read(self) -> FoundOnDisk:
        assert self.may_answer.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        hints = [(b"a", RetentionHint(90, None)), (b"gone", RetentionHint(90, None))]
        return FoundOnDisk([(b"a", ACME), (b"b", ACME)], hints if self._has_hints else [])


def scan_of(record: Any, num_blocks: int = 10) -> tuple[DiskScan, TierIndex]:
    """Return a scan, and the index to which it adds the blocks; `num_blocks` is the capacity of the tier."""
    tier_index = TierIndex("disk", num_blocks)
    return DiskScan(record, tier_index, StoredRetention({"disk": tier_index}), record.deleted.extend), tier_index


def take_all(scan: DiskScan) -> None:
    """Wait until the scan has ended and all of its results are taken."""
    for _ in scan.wait_for_end():
        pass


def test_blocks_are_in_the_index_after_they_are_read_and_taken() -> None:
    record = FakeRecord()
    scan, tier_index = scan_of(record)
    scan_steps = scan.wait_for_end()
    assert next(scan_steps) is None
    scan.take()
    assert list(tier_index) == []
    record.may_answer.set()
    for _ in scan_steps:
        pass
    assert not scan.has_more
    assert list(tier_index) == [b"a", b"b"]
    assert tier_index.holds(b"a")


def test_blocks_stored_during_the_scan_are_evicted_after_earlier_ones() -> None:
    record = FakeRecord()
    scan, tier_index = scan_of(record)
    tier_index.add(b"new", ACME)
    record.may_answer.set()
    take_all(scan)
    scan.take()
    assert list(tier_index) == [b"a", b"b", b"new"]


def test_blocks_that_were_retained_are_evicted_last() -> None:
    record = FakeRecord(has_hints=True)
    scan, tier_index = scan_of(record)
    record.may_answer.set()
    take_all(scan)
    scan.take()
    assert list(tier_index) == [b"b", b"a"]
    assert tier_index.priority_of(b"a") == 90


def test_a_failed_scan_is_logged_and_adds_no_blocks(caplog: pytest.LogCaptureFixture) -> None:
    record = FakeRecord(StoreUnavailable("gone"))
    with caplog.at_level(logging.ERROR):
        scan, tier_index = scan_of(record)
        record.may_answer.set()
        take_all(scan)
    assert list(tier_index) == []
    assert scan.has_failed
    assert "tier disk: the scan failed" in caplog.text


def test_namespaces_are_forgotten_only_after_the_scan(caplog: pytest.LogCaptureFixture) -> None:
    record = FakeRecord()
    scan, _ = scan_of(record)
    scan.take()
    assert record.tidied == []
    record.may_answer.set()
    take_all(scan)
    scan.take()
    assert record.tidied == [[ACME]]
    broken = FakeRecord(StoreUnavailable("gone"))
    scan, _ = scan_of(broken)
    broken.may_answer.set()
    take_all(scan)
    scan.take()
    assert broken.tidied == []


def test_namespaces_of_blocks_found_during_the_scan_are_kept() -> None:
    record = FakeRecord()
    scan, _ = scan_of(record)
    is_alive = scan._reader.is_alive

    def end_scan_and_check() -> bool:
        record.may_answer.set()
        scan._reader.join(PATIENCE_S)
        return is_alive()

    scan._reader.is_alive = end_scan_and_check  # type: ignore[method-assign]
    scan.take()
    assert record.tidied == []
    while scan.has_more:
        scan.take()
    scan.take()
    assert record.tidied == [[ACME]]


def test_shutdown_waits_for_the_scan() -> None:
    record = FakeRecord()
    scan, tier_index = scan_of(record)
    assert not scan.finish(0.0)
    assert list(tier_index) == []
    threading.Timer(0.01, record.may_answer.set).start()
    assert scan.finish(PATIENCE_S)
    assert list(tier_index) == [b"a", b"b"]


def test_shutdown_does_not_wait_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_slowly(*_: object) -> Iterator[None]:
        for _ in range(100):
            time.sleep(0.01)
            yield

    monkeypatch.setattr(DiskScan, "_add_in_slices", add_slowly)
    record = FakeRecord()
    scan, _ = scan_of(record)
    record.may_answer.set()
    scan._reader.join(PATIENCE_S)
    assert not scan.finish(0.05)
    assert scan.has_more


def failing_scan_of(record: FakeRecord) -> DiskScan:
    """Return a scan whose blocks do not all fit into the index, and whose deletions fail, with its results read."""

    def delete(_: object) -> None:
        raise StoreUnavailable("gone")

    tier_index = TierIndex("disk", 1)
    scan = DiskScan(record, tier_index, StoredRetention({"disk": tier_index}), delete)  # type: ignore[arg-type]
    record.may_answer.set()
    scan._reader.join(PATIENCE_S)
    return scan


def test_a_failure_to_index_blocks_is_logged_once_and_no_namespace_is_forgotten() -> None:
    record = FakeRecord()
    scan = failing_scan_of(record)
    with pytest.raises(StoreUnavailable):
        scan.take()
    assert (scan.has_more, scan.has_failed) == (False, True)
    scan.take()
    assert record.tidied == []
    assert list(scan.wait_for_end()) == []
    assert not scan.finish(PATIENCE_S)


def test_shutdown_reports_a_failure_to_index_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        scan = failing_scan_of(FakeRecord())
        assert not scan.finish(PATIENCE_S)
    assert not scan.has_more
    assert "tier disk: adding its blocks to the index failed" in caplog.text


def test_blocks_without_room_in_the_index_are_deleted() -> None:
    record = FakeRecord()
    scan, tier_index = scan_of(record, num_blocks=1)
    record.may_answer.set()
    take_all(scan)
    assert list(tier_index) == [b"b"]
    assert record.deleted == [b"a"]


def test_blocks_are_taken_before_their_priorities_and_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_TAKEN_AT_ONCE", 1)
    record = FakeRecord(has_hints=True)
    scan, tier_index = scan_of(record)
    record.may_answer.set()
    scan._reader.join(PATIENCE_S)
    seen = []
    while scan.has_more:
        scan.take()
        seen.append((list(tier_index), b"a" in tier_index and tier_index.priority_of(b"a")))
    assert seen[:3] == [([b"b"], False), ([b"a", b"b"], DEFAULT_PRIORITY), ([b"b", b"a"], 90)]
    assert not scan.has_failed


def test_the_engine_is_woken_when_there_is_something_to_take() -> None:
    record = FakeRecord()
    woken = threading.Event()
    tier_index = TierIndex("disk", 10)
    retention = StoredRetention({"disk": tier_index})
    scan = DiskScan(record, tier_index, retention, record.deleted.extend, woken.set)  # type: ignore[arg-type]
    record.may_answer.set()
    assert woken.wait(PATIENCE_S)
    assert scan.has_more
