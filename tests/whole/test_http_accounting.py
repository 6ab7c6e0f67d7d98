"""A short run of the accounting campaign over HTTP finds no mistake, and wrong counts are detected."""

from __future__ import annotations

from typing import Any

import pytest

from tests.whole.http_accounting import find_mistake, run

pytestmark = pytest.mark.usefixtures("forked_servers")


def test_the_counts_of_random_calls_add_up() -> None:
    assert set(run(num_calls=150, seed=3)) == {"right"}


def usage(uncached: int, five_minutes: int, hour: int, read: int) -> dict[str, Any]:
    """Return a usage as Anthropic's API reports it; the arguments are numbers of tokens."""
    return {
        "input_tokens": uncached,
        "cache_creation_input_tokens": five_minutes + hour,
        "cache_read_input_tokens": read,
        "cache_creation": {"ephemeral_5m_input_tokens": five_minutes, "ephemeral_1h_input_tokens": hour},
    }


@pytest.mark.parametrize(
    ("counts", "has_breakpoint", "is_right"),
    [
        (usage(1, 2, 3, 4), True, True),
        (usage(2, 2, 3, 4), True, False),  # more than the ten tokens of the prompt
        (usage(1, 2, 4, 3), True, False),  # fewer read than the four known tokens
        (usage(0, 2, 3, 5), True, False),  # more read than the four known tokens
        (usage(1, 2, 3, 4), False, False),  # created without a breakpoint
        ({**usage(1, 2, 3, 4), "cache_creation": {"ephemeral_5m_input_tokens": 4}}, True, False),  # not the sum
    ],
)
def test_wrong_counts_are_detected(counts: dict[str, Any], has_breakpoint: bool, is_right: bool) -> None:
    mistake = find_mistake(counts, list(range(10)), num_known=4, has_breakpoint=has_breakpoint)
    assert (mistake == "") is is_right, mistake
