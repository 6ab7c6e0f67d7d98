from __future__ import annotations

import pytest

from radixkv.api.events import AllCleared, BlocksRemoved, EventBatch
from radixkv.errors import Draining, EventsLost, UnknownEventNumber
from radixkv.events.event_log import EventLog


def removed(num_blocks: int = 1) -> BlocksRemoved:
    """Return an event about removed blocks."""
    return BlocksRemoved(bytes(8 * num_blocks), "")


def filled(num_batches: int, **bounds: int) -> EventLog:
    """Return a log to which batches of one event about one block were appended."""
    log = EventLog(**bounds)
    for _ in range(num_batches):
        log.append((removed(),))
    return log


def read(log: EventLog, after: int) -> list[int]:
    """Return the numbers of the batches after a number."""
    numbers = []
    while (batch := log.after(after)) is not None:
        after = batch.sequence_number
        numbers.append(after)
    return numbers


def test_numbers_rise_by_one() -> None:
    log = filled(5)
    assert read(log, log.start) == [log.start + n for n in range(1, 6)]
    assert (log.first, log.last, log.num_batches, log.num_blocks) == (log.start + 1, log.start + 5, 5, 5)


def test_a_reader_can_continue_from_any_kept_number() -> None:
    log = filled(5)
    for after in range(log.start, log.last + 1):
        log.require(after)
        assert read(log, after) == list(range(after + 1, log.last + 1))


def test_a_ring_forgets_its_oldest_batches() -> None:
    log = filled(25, max_batches=10)
    assert log.last - log.first == 9
    assert read(log, log.first - 1) == list(range(log.first, log.last + 1))
    log.require(log.first - 1)
    with pytest.raises(UnknownEventNumber, match=f"{log.first - 1} to {log.last}"):
        log.require(log.first - 2)
    with pytest.raises(EventsLost):
        log.after(log.first - 2)


def test_the_blocks_of_kept_batches_are_bounded() -> None:
    log = EventLog(max_batches=100, max_blocks=10)
    for _ in range(6):
        log.append((removed(2), removed(1), AllCleared()))
    assert log.last - log.first + 1 == 3, "three batches of three blocks; a fourth one would exceed ten blocks"
    log.append((removed(50),))
    assert log.first == log.last
    assert isinstance(log.after(log.last - 1), EventBatch)
    log.append((removed(),))
    assert log.first == log.last
    assert log.num_blocks == 6 * 3 + 50 + 1, "dropped batches count as well"


def test_after_a_restart_all_earlier_numbers_are_refused() -> None:
    old = EventLog(clock=lambda: 1000.0)
    new = EventLog(clock=lambda: 1000.5)
    for log in (old, new):
        for _ in range(3):
            log.append((removed(),))
    for number in range(old.start, old.last + 1):
        with pytest.raises(UnknownEventNumber):
            new.require(number)
    for number in (1, 2, 3, new.last + 1, 2**64 - 1):
        with pytest.raises(UnknownEventNumber):
            new.require(number)


def test_listeners_are_called_for_each_batch_and_at_the_end() -> None:
    log, notified = EventLog(), []
    log.listen(lambda: notified.append(log.last - log.start))
    log.append((removed(),))
    log.append((removed(),))
    log.close(Draining("engine: stopped"))
    assert notified == [1, 2, 2]
    assert isinstance(log.error, Draining)


def test_a_removed_listener_is_not_called() -> None:
    log, notified = EventLog(), []

    def first() -> None:
        notified.append("first")

    def second() -> None:
        notified.append("second")

    log.listen(first)
    log.listen(second)
    log.unlisten(first)
    log.append((removed(),))
    assert notified == ["second"]
