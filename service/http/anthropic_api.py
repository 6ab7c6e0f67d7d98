"""Anthropic's API: messages, and counting their tokens."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from aiohttp import web

from radixkv.api.limits import Limits
from radixkv.errors import PromptTooLong, UnknownAdapter
from radixkv.service.http.anthropic_requests import read_messages, read_prompt_only
from radixkv.service.http.api_errors import http_status_of, renamed
from radixkv.service.http.api_request import ApiRequest
from radixkv.service.http.breakpoints import CachedRange, Retain, retained_chunks
from radixkv.service.http.completions import Servicer, TextChunk, complete_request, text_chunks
from radixkv.service.http.event_stream import EventStream
from radixkv.service.http.json_fields import Fields
from radixkv.service.http.prompts import PromptEncoder
from radixkv.service.http.tools import CompletionSplitter, Tools
from radixkv.service.text.tool_calls import ToolCall
from radixkv.v1.prefill_pb2 import GenerateRequest, ProbeRequest, Usage

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Names of fields in messages of this server, and in Anthropic's API.
_NAMES = {
    "prefill.token_ids": "messages",
    "token_ids": "messages",
    "max_new_tokens": "max_tokens",
    "adapter": "model",
    "salt": "cache_salt",
    "stop": "stop_sequences",
    "json_schema": "output_config.format.schema",
}
_HOUR_S = 3600


def error_object(message: str, status: int) -> dict[str, Any]:
    """Return the body of a response with an error.

    Args:
        message: says what was wrong.
        status: the HTTP status.
    """
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicApi:
    """Answers requests of Anthropic's API.

    Args:
        servicer: generates completions.
        retain: retains a prefix for some time; see `CacheServicer.Retain`.
        encoder: encodes prompts.
        limits: of the engine.
    """

    def __init__(self, servicer: Servicer, retain: Retain, encoder: PromptEncoder, limits: Limits) -> None:
        self._servicer = servicer
        self._retain = retain
        self._encoder = encoder
        self._limits = limits

    def error(self, error: BaseException) -> Mapping[str, Any]:
        """Return the body of the response to a request that failed."""
        message, field = renamed(error, _NAMES)
        if isinstance(error, UnknownAdapter):
            message = f"model: expected {self._limits.model} or the name of a loaded adapter, got another name"
        if (
            isinstance(error, PromptTooLong) and field == "messages"
        ):  # agents search for these words, and then shorten the conversation
            message = f"prompt is too long: {message}"
        return error_object(message, http_status_of(error))

    async def count_tokens(self, request: ApiRequest, fields: Fields) -> web.StreamResponse:
        """Answer `POST /v1/messages/count_tokens`."""
        prompt, model = read_prompt_only(fields)
        tenant = request.hold(GenerateRequest())
        token_ids, _ = await self._encoder.encode(request.num_bytes, "messages", prompt.encode)
        if model not in ("", self._limits.model):  # a probe fails if it is no adapter
            await self._servicer.Probe(
                ProbeRequest(token_ids=token_ids[:1], tenant=tenant, adapter=model), request.call
            )
        return request.json({"input_tokens": len(token_ids)})

    async def messages(self, request: ApiRequest, fields: Fields) -> web.StreamResponse:
        """Answer `POST /v1/messages`."""
        prompt, options = read_messages(fields)
        tenant = request.hold(options.generate)
        token_ids, ranges = await self._encoder.encode(request.num_bytes, "messages", prompt.encode)
        generate = complete_request(options.generate, token_ids, options.model, tenant, self._limits)
        tokenizer = await self._encoder.tokenizer()
        writer = _ResponseWriter(request, prompt.tools, ranges, options.model or self._limits.model)
        chunks = text_chunks(self._servicer, generate, request.call, tokenizer, options.stops)
        retaining = retained_chunks(chunks, ranges, generate.prefill, self._retain, request.call)
        async with contextlib.aclosing(retaining):
            return await (writer.stream(retaining) if options.is_streamed else writer.whole(retaining))


class _ResponseWriter:
    """Writes the response to one request.

    Args:
        request: the request.
        tools: its tools.
        ranges: the ranges of the prompt that should be retained, the shortest first.
        model: the name of the model or adapter that answers.
    """

    def __init__(self, request: ApiRequest, tools: Tools, ranges: Sequence[CachedRange], model: str) -> None:
        self._request = request
        self._ranges = ranges
        self._head = {"id": f"msg_{request.request_id}", "type": "message", "role": "assistant", "model": model}
        self._num_tokens = 0
        self._splitter = CompletionSplitter(tools)

    async def whole(self, chunks: AsyncGenerator[TextChunk, None]) -> web.StreamResponse:
        """Return the response after the completion has ended."""
        pieces = []
        async for chunk in chunks:
            self._num_tokens += len(chunk.response.token_ids)
            pieces.append(chunk.text)
        text, calls = self._splitter.put("".join(pieces), is_last=True)
        content: list[dict[str, Any]] = []
        if text or (self._num_tokens and not calls):
            content.append({"type": "text", "text": text})
        content += [_tool_use(call) for call in calls]
        usage = self._usage(chunk.response.usage, chunk)
        return self._request.json({**self._head, "content": content, **self._end_of(chunk), "usage": usage})

    async def stream(self, chunks: AsyncGenerator[TextChunk, None]) -> web.StreamResponse:
        """Send events as text is generated, and return the response."""
        events = self._request.events(lambda body: events.send(body, "error"))
        blocks = _Blocks(events)
        async for chunk in chunks:
            if not events.has_begun:
                nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
                usage = self._usage(chunk.response.usage, None)
                await blocks.send("message_start", message={**self._head, **nothing, "usage": usage})
            self._num_tokens += len(chunk.response.token_ids)
            text, calls = self._splitter.put(chunk.text, is_last=chunk.is_last)
            if text:
                await blocks.add_text(text)
            for call in calls:
                await blocks.add_call(_tool_use(call))
        await blocks.end()
        await blocks.send("message_delta", delta=self._end_of(chunk), usage=self._usage(chunk.response.usage, chunk))
        await blocks.send("message_stop")
        return await events.end()

    def _end_of(self, chunk: TextChunk) -> dict[str, Any]:
        """Return why the completion ended."""
        matched = chunk.response.matched_stop or None
        reason = "stop_sequence" if matched else "tool_use" if self._splitter.has_calls else "end_turn"
        return {"stop_reason": "max_tokens" if chunk.has_reached_length else reason, "stop_sequence": matched}

    def _usage(self, usage: Usage, last: TextChunk | None) -> dict[str, Any]:
        """Return the usage, whose input tokens add up to the prompt.

        | tokens of the prompt | count |
        |---|---|
        | that were cached | `cache_read_input_tokens` |
        | others before the last breakpoint | `cache_creation_input_tokens`, by their time to live |
        | all others | `input_tokens` |

        Args:
            usage: of the prompt.
            last: the last chunk; None at the beginning.
        """
        cached = usage.cached_tokens
        created = max(0, self._ranges[-1].num_tokens - cached) if self._ranges else 0
        for_an_hour = max(
            (max(0, each.num_tokens - cached) for each in self._ranges if each.ttl_s == _HOUR_S), default=0
        )
        counts = {
            "input_tokens": usage.prompt_tokens - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created - for_an_hour,
                "ephemeral_1h_input_tokens": for_an_hour,
            },
            "output_tokens": self._num_tokens,
            "service_tier": "standard",
        }
        return counts if last is None else {**counts, "miss_reason": last.miss_reason}


class _Blocks:
    """Sends the content of a streamed response as blocks: text, and calls of tools.

    Args:
        events: the response.
    """

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._index = -1
        self._is_open = False  # a block of text

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self._events.send({"type": kind, **fields}, kind)

    async def add_text(self, text: str) -> None:
        """Send text, in the last block if it is text, or else in a new one."""
        if not self._is_open:
            self._is_open = True
            await self._begin({"type": "text", "text": ""})
        await self.send("content_block_delta", index=self._index, delta={"type": "text_delta", "text": text})

    async def add_call(self, call: dict[str, Any]) -> None:
        """Send the call of a tool as a block of its own."""
        await self.end()
        await self._begin({**call, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call["input"], ensure_ascii=False)}
        await self.send("content_block_delta", index=self._index, delta=delta)
        await self.send("content_block_stop", index=self._index)

    async def end(self) -> None:
        """End the last block if it is text."""
        if self._is_open:
            self._is_open = False
            await self.send("content_block_stop", index=self._index)

    async def _begin(self, block: dict[str, Any]) -> None:
        self._index += 1
        await self.send("content_block_start", index=self._index, content_block=block)


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return the block of a call."""
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name, "input": call.arguments}
