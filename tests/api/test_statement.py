from __future__ import annotations

import re

import pytest

from radixkv.api.statement import MAX_DAYS, DayRange, Use, day_name, day_number, month_name
from radixkv.errors import InvalidRequest

TODAY = day_number("2026-11-28")


@pytest.mark.parametrize(
    ("since", "until", "first", "last"),
    [
        ("", "", "2026-11-01", "2026-11-28"),
        ("2026-11", "2026-11", "2026-11-01", "2026-11-30"),
        ("2024-02", "2024-02", "2024-02-01", "2024-02-29"),
        ("", "2026-02", "2026-02-01", "2026-02-28"),
        ("2026-12", "2027-01", "2026-12-01", "2027-01-31"),
        ("2026-11-05", "", "2026-11-05", "2026-11-28"),
        ("2026-11-28", "2026-11-28", "2026-11-28", "2026-11-28"),
        ("2025-10-25", "2026-11-28", "2025-10-25", "2026-11-28"),
    ],
)
def test_a_range_is_given_in_days_or_months(since: str, until: str, first: str, last: str) -> None:
    days = DayRange.read(since, until, TODAY)
    assert (day_name(days.first), day_name(days.end - 1)) == (first, last)


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [
        ("2026-13", "", "since: expected a day such as 2026-11-28, or a month such as 2026-11, got '2026-13'"),
        ("", "2026-02-30", "until: expected a day such as"),
        ("", "0000-01", "until: expected a day such as"),
        ("", "9999-12", "until: expected a day such as"),
        ("November", "", "since: expected a day such as"),
        ("2026-11-\u06630", "", "since: expected a day such as"),  # an Arabic digit
        ("2026-11-29", "", "expected 1 to 400 days, the last of which is not before the first, got 2026-11-29 to 2026"),
        ("2025-10-24", "", "expected 1 to 400 days"),
        ("x" * 1000, "", re.escape("got '" + "x" * 40 + "'")),
    ],
)
def test_a_wrong_range_is_refused_with_what_was_expected(since: str, until: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        DayRange.read(since, until, TODAY)


def test_a_range_has_at_most_400_days() -> None:
    assert len(DayRange.read(day_name(TODAY - MAX_DAYS + 1), "", TODAY)) == MAX_DAYS


def test_all_numbers_of_a_use_are_added() -> None:
    numbers = range(1, len(Use._fields) + 1)
    assert Use(*numbers).plus(Use(*[10 * each for each in numbers])) == Use(*[11 * each for each in numbers])


def test_days_and_months_have_names() -> None:
    assert (day_name(0), month_name(TODAY)) == ("1970-01-01", "2026-11")
