"""A short run of the expiry campaign over HTTP finds no mistake, and wrong counts are detected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.whole.http_expiry import Document, run


def test_a_retained_document_is_read_until_it_expires() -> None:
    outcomes = asyncio.run(run(num_calls=200, seed=2))
    assert set(outcomes) == {"first", "retained", "kept", "evicted"}


def usage(uncached: int, created: int, read: int, miss_reason: str | None = None) -> dict[str, Any]:
    """Return a usage as the API reports it; the first three arguments are numbers of tokens."""
    return {
        "input_tokens": uncached,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "miss_reason": miss_reason,
    }


@pytest.mark.parametrize(
    ("counts", "now_s", "outcome"),
    [
        (usage(5, 0, 20), 0.0, "retained"),
        (usage(5, 10, 10), 0.0, "WRONG read 10 of 20 tokens before they expired"),
        (usage(5, 0, 20), 400.0, "kept"),
        (usage(5, 20, 0, "expired"), 400.0, "evicted"),
        (usage(4, 0, 20), 0.0, "WRONG the counts do not add up to 25"),
        (usage(10, 0, 15), 0.0, "WRONG the breakpoint is after 15 tokens, and was after 20"),
    ],
)
def test_a_call_has_the_outcome_that_its_counts_show(counts: dict[str, Any], now_s: float, outcome: str) -> None:
    document = Document("a", "5m", num_tokens=20, expires_at_s=300.0)
    assert document.check_usage(counts, 25, now_s).startswith(outcome)
