"""Sequence numbers: expected ones, old ones, and gaps."""

from __future__ import annotations

from radixkv.api.events import AllCleared, EventBatch, SnapshotPart
from radixkv.routing.event_cursor import EventCursor, Verdict


def batch(number: int) -> EventBatch:
    return EventBatch(number, 0.0, (AllCleared(),))


def part(number: int, index: int, count: int) -> EventBatch:
    return EventBatch(number, 0.0, (AllCleared(),), SnapshotPart(index, count, 0))


def verdicts(cursor: EventCursor, *batches: EventBatch) -> str:
    """Return the first letters of the verdicts: of APPLY, SKIP and RESYNC."""
    return "".join(cursor.take(each).name[0] for each in batches)


def test_a_cursor_begins_with_a_snapshot() -> None:
    cursor = EventCursor()
    assert verdicts(cursor, batch(5)) == "R"
    assert verdicts(cursor, part(7, 0, 2), part(7, 1, 2), batch(8), batch(9)) == "AAAA"
    assert (cursor.number, cursor.is_up_to_date) == (9, True)


def test_a_gap_is_healed_by_a_snapshot_only() -> None:
    cursor = EventCursor()
    assert verdicts(cursor, part(7, 0, 1), batch(9), batch(10), batch(8)) == "ARRR"
    assert (cursor.number, cursor.is_up_to_date) == (0, False)
    assert verdicts(cursor, part(10, 0, 1), batch(11)) == "AA"


def test_batches_that_were_already_read_are_skipped() -> None:
    cursor = EventCursor()
    assert verdicts(cursor, part(7, 0, 1), batch(8), batch(8), batch(7), batch(9)) == "AASSA"


def test_a_snapshot_with_a_missing_part_needs_a_new_snapshot() -> None:
    for batches in (
        (part(7, 0, 3), part(7, 2, 3)),
        (part(7, 0, 3), part(7, 1, 3), batch(8)),
        (part(7, 1, 2),),
    ):
        cursor = EventCursor()
        assert verdicts(cursor, *batches) == "A" * (len(batches) - 1) + "R"
        assert not cursor.is_up_to_date


def test_a_snapshot_may_restart() -> None:
    cursor = EventCursor()
    assert verdicts(cursor, part(7, 0, 2), part(8, 0, 2), part(8, 1, 2), batch(9), part(9, 0, 1)) == "AAAAA"
    assert cursor.is_up_to_date


def test_parts_of_two_snapshots_do_not_make_one() -> None:
    cursor = EventCursor()
    assert verdicts(cursor, part(7, 0, 2), part(9, 1, 2)) == "AR"


def test_a_cursor_is_not_up_to_date_within_a_snapshot() -> None:
    cursor = EventCursor()
    cursor.take(part(7, 0, 2))
    assert not cursor.is_up_to_date
    assert cursor.take(part(7, 1, 2)) is Verdict.APPLY
    assert cursor.is_up_to_date
