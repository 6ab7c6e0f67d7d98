"""Blocks of a disk are known when its index was read, and a disk that fails holds none."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from radixkv.cache.elsewhere.retentions import Wish
from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.cache.elsewhere.stored_retention import StoredRetention
from radixkv.engine.offload.disk_record import EarlierDisk
from radixkv.engine.offload.earlier_blocks import EarlierBlocks
from radixkv.errors import StoreUnavailable
from radixkv.namespace import Namespace
from tests.patience import PATIENCE_S

ACME = Namespace("model", "acme")


class FakeRecord:
    """Tells what it has when it is let."""

    def __init__(self, error: Exception | None = None, *, has_wishes: bool = False) -> None:
        self.may_answer = threading.Event()
        self._error = error
        self._has_wishes = has_wishes

    def read(self) -> EarlierDisk:
        assert self.may_answer.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        wishes = [(b"a", Wish(90, None)), (b"gone", Wish(90, None))]
        return EarlierDisk([(b"a", ACME), (b"b", ACME)], wishes if self._has_wishes else [])


def earlier(record: Any) -> tuple[EarlierBlocks, Shelf]:
    shelf = Shelf("disk", 10)
    return EarlierBlocks(record, shelf, StoredRetention({"disk": shelf})), shelf


def test_blocks_are_known_once_they_are_read_and_taken() -> None:
    record = FakeRecord()
    blocks, shelf = earlier(record)
    reading = blocks.reading()
    assert next(reading) is None
    blocks.take()
    assert list(shelf) == []
    record.may_answer.set()
    assert set(reading) <= {None}
    blocks.take()
    assert list(shelf) == [b"a", b"b"]
    assert shelf.holds(b"a")


def test_what_is_stored_meanwhile_goes_after_what_was_there() -> None:
    record = FakeRecord()
    blocks, shelf = earlier(record)
    shelf.add(b"new", ACME)
    record.may_answer.set()
    assert set(blocks.reading()) <= {None}
    blocks.take()
    assert list(shelf) == [b"a", b"b", b"new"]


def test_what_was_retained_goes_after_the_rest() -> None:
    record = FakeRecord(has_wishes=True)
    blocks, shelf = earlier(record)
    record.may_answer.set()
    assert set(blocks.reading()) <= {None}
    blocks.take()
    assert list(shelf) == [b"b", b"a"]
    assert shelf.priority_of(b"a") == 90


def test_a_disk_that_fails_is_told_and_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    record = FakeRecord(StoreUnavailable("gone"))
    with caplog.at_level(logging.ERROR):
        blocks, shelf = earlier(record)
        record.may_answer.set()
        assert set(blocks.reading()) <= {None}
    blocks.take()
    assert list(shelf) == []
    assert "tier disk: expected to read what it holds, got: gone" in caplog.text
