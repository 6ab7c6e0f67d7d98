"""A short run of the campaign of Anthropic's API, and what it detects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.whole.http_accounting import check, run

pytestmark = pytest.mark.usefixtures("forked_servers")


def test_the_counts_of_random_calls_add_up() -> None:
    assert set(run(num_calls=150, seed=3)) == {"right"}


def usage(plain: int, five: int, hour: int, read: int) -> dict[str, Any]:
    return {
        "input_tokens": plain,
        "cache_creation_input_tokens": five + hour,
        "cache_read_input_tokens": read,
        "cache_creation": {"ephemeral_5m_input_tokens": five, "ephemeral_1h_input_tokens": hour},
    }


@pytest.mark.parametrize(
    ("counts", "has_breakpoint", "is_right"),
    [
        (usage(1, 2, 3, 4), True, True),
        (usage(2, 2, 3, 4), True, False),  # more than the prompt
        (usage(1, 2, 4, 3), True, False),  # less than what was known
        (usage(0, 2, 3, 5), True, False),  # more than what was known
        (usage(1, 2, 3, 4), False, False),  # created without a breakpoint
        ({**usage(1, 2, 3, 4), "cache_creation": {"ephemeral_5m_input_tokens": 4}}, True, False),
    ],
)
def test_wrong_counts_are_detected(counts: dict[str, Any], has_breakpoint: bool, is_right: bool) -> None:
    assert (check(counts, list(range(10)), num_known=4, has_breakpoint=has_breakpoint) == "") is is_right
