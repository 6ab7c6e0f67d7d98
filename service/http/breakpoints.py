"""Breakpoints: positions in a conversation up to which its prompt should be retained."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.service.http.completions import CompletionChunk
from radixkv.service.server.calls import Context
from radixkv.v1.cache_pb2 import RetainRequest
from radixkv.v1.prefill_pb2 import PrefillRequest

# The priority with which a request retains its prompt for some time, above the default of 50.
RETENTION_PRIORITY = 75

_INSTRUCTIONS = ("system", "developer")

# Returns the token ids of messages, without a generation prompt.
Encode = Callable[[Sequence[Mapping[str, Any]]], Sequence[int]]
# Retains a range for some time; see `CacheServicer.Retain`.
Retain = Callable[[RetainRequest, Context], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a content part up to which the prompt should be retained.

    Attributes:
        num_messages: number of messages that begin before the position, including the system prompt and the message
            that contains the position; 0 if the position is after the tools, which precede all messages.
        num_parts: number of content parts before the position in the last of these messages. Tool calls are at the end
            of their message.
        ttl_s: seconds of retention. This time starts again with each later request that finds the range on the device.
    """

    num_messages: int
    num_parts: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class RetainedRange:
    """The first tokens of a prompt, and the seconds for which they should be retained."""

    num_tokens: int
    ttl_s: int


def retained_ranges(
    breakpoints: Sequence[Breakpoint],
    messages: Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    encode: Encode,
) -> list[RetainedRange]:
    """Return the range of tokens before each breakpoint, without empty ones.

    Args:
        breakpoints: the breakpoints, in the order of their positions.
        messages: the conversation.
        token_ids: token ids of the conversation.
        encode: see `Encode`.
    """
    ranges = (RetainedRange(_num_tokens_before(each, messages, token_ids, encode), each.ttl_s) for each in breakpoints)
    return [each for each in ranges if each.num_tokens]


def _num_tokens_before(
    end_point: Breakpoint, messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int], encode: Encode
) -> int:
    """Return how many tokens the prompt has in common with a conversation that ends at a breakpoint.

    A template may require a user message, so one is added if only instructions precede the breakpoint.
    """
    shortened = list(messages[: end_point.num_messages])
    if shortened and end_point.num_parts < len(shortened[-1]["content"] or ()):
        other_fields = {name: value for name, value in shortened[-1].items() if name != "tool_calls"}
        shortened[-1] = {**other_fields, "content": shortened[-1]["content"][: end_point.num_parts]}
    if all(message["role"] in _INSTRUCTIONS for message in shortened):
        shortened.append({"role": "user", "content": "."})
    shortened_ids = encode(shortened)
    for index, (prompt_id, shortened_id) in enumerate(zip(token_ids, shortened_ids, strict=False)):
        if prompt_id != shortened_id:
            return index
    return min(len(token_ids), len(shortened_ids))


async def retained_chunks(
    chunks: AsyncGenerator[CompletionChunk, None],
    ranges: Sequence[RetainedRange],
    prefill: PrefillRequest,
    retain: Retain,
    call: Context,
) -> AsyncGenerator[CompletionChunk, None]:
    """Yield the chunks of a completion, and retain ranges of its prompt.

    The request itself carries one retention, that of the longest range. Shorter ranges with a longer time are retained
    before the first chunk is yielded, because the prompt is cached when the first token of the completion is known.

    Args:
        chunks: chunks of the completion, which starts when the first one is requested.
        ranges: the ranges to retain, shortest first.
        prefill: the request, which may already request the retention of the whole prompt; changed in place.
        retain: retains a range.
        call: the HTTP request.
    """
    longer_lasting = _request_retention(prefill, ranges)
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            for each in longer_lasting:
                await retain(_retain_request(each, prefill), call)
            longer_lasting = []
            yield chunk


def _request_retention(prefill: PrefillRequest, ranges: Sequence[RetainedRange]) -> list[RetainedRange]:
    """Request the retention of the longest range. Returns the other ranges that are to be retained for longer."""
    whole_ttl_s = prefill.retention.ttl.seconds
    whole_prompt = [RetainedRange(len(prefill.token_ids), whole_ttl_s)] if whole_ttl_s else []
    lasting: list[RetainedRange] = []
    for each in reversed([*ranges, *whole_prompt]):
        if not lasting or each.ttl_s > lasting[-1].ttl_s:
            lasting.append(each)
    if not lasting:
        return []
    retention = prefill.retention
    retention.priority, retention.ttl.seconds = RETENTION_PRIORITY, lasting[0].ttl_s
    retention.end_token = lasting[0].num_tokens
    retention.renew = True
    return lasting[1:]


def _retain_request(retained: RetainedRange, prefill: PrefillRequest) -> RetainRequest:
    request = RetainRequest(
        token_ids=prefill.token_ids[: retained.num_tokens],
        tenant=prefill.tenant,
        adapter=prefill.adapter,
        salt=prefill.salt,
    )
    request.retention.priority, request.retention.ttl.seconds = RETENTION_PRIORITY, retained.ttl_s
    request.retention.renew = True
    return request
