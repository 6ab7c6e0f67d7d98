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

FIVE_MINUTES_S, HOUR_S = 300, 3600


def retentions_of(ranges: list[RetainedRange], prompt_ttl_s: int = 0) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Return the tokens and the seconds that the request itself retains, and those of each further Retain call.

    Args:
        ranges: the ranges that breakpoints retain.
        prompt_ttl_s: seconds for which the request retains its whole prompt of ten tokens; 0 if it does not.
    """
    prefill = PrefillRequest(token_ids=range(10), salt="s")
    if prompt_ttl_s:
        prefill.retention.ttl.seconds = prompt_ttl_s
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
    assert retention.renew is (bool(prompt_ttl_s) or bool(ranges))
    return (retention.end_token, retention.ttl.seconds), [
        (len(each.token_ids), each.retention.ttl.seconds) for each in calls
    ]


@pytest.mark.parametrize(
    ("ranges", "prompt_ttl_s", "own", "further"),
    [
        ([], 0, (0, 0), []),
        ([], HOUR_S, (10, HOUR_S), []),
        ([RetainedRange(4, FIVE_MINUTES_S)], 0, (4, FIVE_MINUTES_S), []),
        ([RetainedRange(4, HOUR_S), RetainedRange(6, FIVE_MINUTES_S)], 0, (6, FIVE_MINUTES_S), [(4, HOUR_S)]),
        ([RetainedRange(4, FIVE_MINUTES_S), RetainedRange(6, HOUR_S)], 0, (6, HOUR_S), []),
        ([RetainedRange(4, HOUR_S), RetainedRange(6, HOUR_S)], 0, (6, HOUR_S), []),
        ([RetainedRange(4, HOUR_S)], FIVE_MINUTES_S, (10, FIVE_MINUTES_S), [(4, HOUR_S)]),
        ([RetainedRange(4, FIVE_MINUTES_S)], HOUR_S, (10, HOUR_S), []),
    ],
)
def test_each_range_is_retained_for_its_longest_time(
    ranges: list[RetainedRange], prompt_ttl_s: int, own: tuple[int, int], further: list[tuple[int, int]]
) -> None:
    assert retentions_of(ranges, prompt_ttl_s) == (own, further)


def test_a_range_ends_where_the_shortened_conversation_does() -> None:
    def encode(messages: Any) -> list[int]:
        """Encode a message as a 0 and a token per character."""
        token_ids = []
        for message in messages:
            token_ids += [0, *(ord(part["text"]) for part in message["content"])]
        return token_ids

    messages = [
        {"role": "developer", "content": [{"text": "a"}]},
        {"role": "user", "content": [{"text": "b"}, {"text": "c"}]},
    ]
    breakpoints = [Breakpoint(2, 1, FIVE_MINUTES_S), Breakpoint(2, 2, HOUR_S)]
    ranges = retained_ranges(breakpoints, messages, [*encode(messages), 7], encode)
    assert ranges == [RetainedRange(4, FIVE_MINUTES_S), RetainedRange(5, HOUR_S)]
