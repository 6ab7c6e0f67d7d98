"""Which ranges of a prompt are retained, and by which request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from radixkv.service.http.breakpoints import Breakpoint, RetainedRange, retained_chunks, retained_ranges
from radixkv.service.http.completions import CompletionChunk
from radixkv.v1.cache_pb2 import RetainRequest
from radixkv.v1.prefill_pb2 import GenerateResponse, PrefillRequest

MINUTES, HOURS = 300, 3600


def retained(ranges: list[RetainedRange], whole_s: int = 0) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Return the tokens and the seconds that the request itself retains, and those of further calls."""
    prefill = PrefillRequest(token_ids=range(10), salt="s")
    if whole_s:
        prefill.retention.ttl.seconds = whole_s
    calls: list[RetainRequest] = []

    async def retain(request: RetainRequest, context: Any) -> None:
        calls.append(request)

    async def chunks() -> AsyncGenerator[CompletionChunk, None]:
        assert not calls, "the prompt is not cached yet"
        yield CompletionChunk(0, "a", GenerateResponse())
        yield CompletionChunk(0, "b", GenerateResponse())

    async def main() -> list[str]:
        return [each.text async for each in retained_chunks(chunks(), ranges, prefill, retain, None)]  # type: ignore[arg-type]

    assert asyncio.run(main()) == ["a", "b"]
    assert all(each.salt == "s" for each in calls)
    retention = prefill.retention
    assert all(each.retention.renew for each in calls)  # each hit restarts the time to live
    assert retention.renew is (bool(whole_s) or bool(ranges))
    return (retention.end_token, retention.ttl.seconds), [
        (len(each.token_ids), each.retention.ttl.seconds) for each in calls
    ]


@pytest.mark.parametrize(
    ("ranges", "whole_s", "own", "others"),
    [
        ([], 0, (0, 0), []),
        ([], HOURS, (10, HOURS), []),
        ([RetainedRange(4, MINUTES)], 0, (4, MINUTES), []),
        ([RetainedRange(4, HOURS), RetainedRange(6, MINUTES)], 0, (6, MINUTES), [(4, HOURS)]),
        ([RetainedRange(4, MINUTES), RetainedRange(6, HOURS)], 0, (6, HOURS), []),
        ([RetainedRange(4, HOURS), RetainedRange(6, HOURS)], 0, (6, HOURS), []),
        ([RetainedRange(4, HOURS)], MINUTES, (10, MINUTES), [(4, HOURS)]),
        ([RetainedRange(4, MINUTES)], HOURS, (10, HOURS), []),
    ],
)
def test_each_range_is_retained_for_its_longest_time(
    ranges: list[RetainedRange], whole_s: int, own: tuple[int, int], others: list[tuple[int, int]]
) -> None:
    assert retained(ranges, whole_s) == (own, others)


def test_a_range_ends_where_the_shortened_conversation_does() -> None:
    def encode(messages: Any) -> list[int]:
        return [each for message in messages for each in [0, *(ord(part["text"]) for part in message["content"])]]

    messages = [
        {"role": "developer", "content": [{"text": "a"}]},
        {"role": "user", "content": [{"text": "b"}, {"text": "c"}]},
    ]
    breakpoints = [Breakpoint(2, 1, MINUTES), Breakpoint(2, 2, HOURS)]
    found = retained_ranges(breakpoints, messages, [*encode(messages), 7], encode)
    assert found == [RetainedRange(4, MINUTES), RetainedRange(5, HOURS)]
