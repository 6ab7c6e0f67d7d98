"""Anthropic's API: messages, and counting their tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from radixkv.errors import InvalidRequest, PromptTooLong, UnknownAdapter
from radixkv.service.field_names import prompt_field_names
from radixkv.service.http.anthropic_requests import read_messages, read_prompt_only
from radixkv.service.http.api_errors import http_status_of, message_and_field
from radixkv.service.http.api_request import ApiRequest
from radixkv.service.http.cache_diagnostics import CacheDiagnostics, PromptDifference
from radixkv.service.http.completer import Completer
from radixkv.service.http.completions import CompletionChunk
from radixkv.service.http.event_stream import EventStream
from radixkv.service.http.json_fields import Fields
from radixkv.service.http.tools import EncodedChat
from radixkv.service.text.answer_format import AnswerPart, Reasoning
from radixkv.service.text.tool_calls import ToolCall
from radixkv.v1.prefill_pb2 import GenerateRequest, Usage

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
# The names of fields in Anthropic's API, by their names in messages of this server.
_FIELD_NAMES = {
    **prompt_field_names("messages", "max_tokens"),
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
        completer: completes prompts.
    """

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._diagnostics = CacheDiagnostics()

    def error(self, error: BaseException) -> Mapping[str, Any]:
        """Return the body of the response to a request that failed."""
        message, field = message_and_field(error, _FIELD_NAMES)
        if isinstance(error, UnknownAdapter):
            message = self._completer.unknown_model_message
        if isinstance(error, PromptTooLong):  # agents search for these words, and then shorten the conversation
            reason = "prompt is too long" if field == "messages" else "input length and max_tokens exceed context limit"
            message = f"{reason}: {message}"
        return error_object(message, http_status_of(error))

    async def count_tokens(self, request: ApiRequest, fields: Fields) -> web.StreamResponse:
        """Answer `POST /v1/messages/count_tokens`."""
        prompt, model = read_prompt_only(fields)
        tenant = request.hold(GenerateRequest())
        chat = await self._completer.encode(request, prompt)
        if not chat.token_ids:  # some chat templates write nothing for a message without text
            raise InvalidRequest("messages: expected at least 1 token, got 0")
        await self._completer.require_model(request, model, chat.token_ids[0], tenant)
        return request.json({"input_tokens": len(chat.token_ids)})

    async def messages(self, request: ApiRequest, fields: Fields) -> web.StreamResponse:
        """Answer `POST /v1/messages`."""
        prompt, options = read_messages(fields)
        tenant = request.hold(options.generate)
        completer = self._completer
        chat = (await completer.encode(request, prompt)).constrain(options.generate)
        generate = completer.with_prompt(options.generate, chat.token_ids, options.model, tenant)
        model = options.model or completer.limits.model
        diagnosis = None
        if options.is_diagnosed:
            diagnose = partial(
                self._diagnostics.diagnose,
                tenant,
                f"msg_{request.request_id}",
                options.previous_message_id,
                prompt.compared_parts(model, len(chat.token_ids)),
            )
            diagnosis = await completer.encoder.run_on_thread(request.num_bytes, diagnose)
        writer = _ResponseWriter(request, chat, model, diagnosis)
        chunks = await completer.chunks(request, generate, options.stops, chat.shown_tags, chat.ranges)
        async with contextlib.aclosing(chunks):
            if options.is_streamed:
                return await writer.write_stream(chunks)
            return await writer.write_whole(chunks)


class _ResponseWriter:
    """Writes the response to one request.

    Args:
        request: the request.
        chat: its conversation.
        model: the name of the model or adapter that answers.
        diagnosis: how the prompt differs from that of an earlier message; None if it only continues that prompt, or if
            the request names no earlier message.
    """

    def __init__(self, request: ApiRequest, chat: EncodedChat, model: str, diagnosis: PromptDifference | None) -> None:
        self._diagnosis = diagnosis
        self._request = request
        self._ranges = chat.ranges
        self._head = {"id": f"msg_{request.request_id}", "type": "message", "role": "assistant", "model": model}
        self._num_tokens = 0
        self._answer = chat.answer_parts()

    async def write_whole(self, chunks: AsyncGenerator[CompletionChunk, None]) -> web.StreamResponse:
        """Return the response after the completion has ended."""
        content: list[dict[str, Any]] = []
        async for chunk in chunks:
            self._num_tokens += len(chunk.response.token_ids)
            for part in self._answer.put(chunk.text, is_last=chunk.is_last):
                _add_part(content, part)
        for block in content:
            if block["type"] == "thinking":
                block["signature"] = _signature(block["thinking"])
        if self._num_tokens and not content:
            content.append({"type": "text", "text": ""})
        response = chunk.response  # of the last chunk
        return self._request.json(
            {
                **self._head,
                "content": content,
                **self._stop_fields(chunk),
                "usage": self._usage(response.usage, chunk),
                "diagnostics": self._diagnostics_object(response.usage),
            }
        )

    async def write_stream(self, chunks: AsyncGenerator[CompletionChunk, None]) -> web.StreamResponse:
        """Send events as text is generated, and return the response."""

        async def send_error(body: Mapping[str, Any]) -> None:
            await events.send(body, "error")

        events = self._request.events(send_error)
        blocks = _Blocks(events)
        async for chunk in chunks:
            if not events.has_begun:
                unfinished: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
                usage = chunk.response.usage
                prompt_fields = {"usage": self._usage(usage, None), "diagnostics": self._diagnostics_object(usage)}
                await blocks.send("message_start", message={**self._head, **unfinished, **prompt_fields})
            self._num_tokens += len(chunk.response.token_ids)
            for part in self._answer.put(chunk.text, is_last=chunk.is_last):
                if isinstance(part, ToolCall):
                    await blocks.add_call(_tool_use(part))
                elif isinstance(part, Reasoning):
                    await blocks.add_text(part.text, "thinking")
                else:
                    await blocks.add_text(part)
        await blocks.end()
        await blocks.send(
            "message_delta", delta=self._stop_fields(chunk), usage=self._usage(chunk.response.usage, chunk)
        )
        await blocks.send("message_stop")
        return await events.end()

    def _diagnostics_object(self, usage: Usage) -> dict[str, Any] | None:
        """Return the field `diagnostics`."""
        if self._diagnosis is None:
            return None
        return {"cache_miss_reason": self._diagnosis.reason(usage.cached_tokens)}

    def _stop_fields(self, chunk: CompletionChunk) -> dict[str, Any]:
        """Return `stop_reason` and `stop_sequence`, which say why the completion ended."""
        matched_stop = chunk.response.matched_stop or None
        if chunk.has_reached_length:
            reason = "max_tokens"
        elif matched_stop:
            reason = "stop_sequence"
        elif self._answer.num_calls:
            reason = "tool_use"
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": matched_stop}

    def _usage(self, usage: Usage, last: CompletionChunk | None) -> dict[str, Any]:
        """Return the usage, whose input tokens add up to the prompt.

        | tokens of the prompt | count |
        |---|---|
        | that were cached | `cache_read_input_tokens` |
        | others before the last breakpoint | `cache_creation_input_tokens`, by their time to live |
        | all others | `input_tokens` |

        Args:
            usage: usage of the prompt.
            last: the last chunk; None at the beginning.
        """
        cached = usage.cached_tokens
        created = max(0, self._ranges[-1].num_tokens - cached) if self._ranges else 0
        hour_ends = [each.num_tokens for each in self._ranges if each.ttl_s == _HOUR_S]
        created_for_an_hour = max(0, max(hour_ends, default=0) - cached)
        counts = {
            "input_tokens": usage.prompt_tokens - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created - created_for_an_hour,
                "ephemeral_1h_input_tokens": created_for_an_hour,
            },
            "output_tokens": self._num_tokens,
            "service_tier": "standard",
        }
        return counts if last is None else {**counts, "miss_reason": last.miss_reason, **last.additions}


class _Blocks:
    """Sends the content of a streamed response as blocks: reasoning, text, and tool calls.

    Args:
        events: the response.
    """

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._index = -1
        self._open_kind = ""  # of the block of text that is open: `text` or `thinking`
        self._thinking: list[str] = []

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self._events.send({"type": kind, **fields}, kind)

    async def add_text(self, text: str, kind: str = "text") -> None:
        """Send text or reasoning, in the last block if it is of this kind, or else in a new one."""
        if self._open_kind != kind:
            await self.end()
            self._open_kind = kind
            await self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        if kind == "thinking":
            self._thinking.append(text)
        await self._delta({"type": f"{kind}_delta", kind: text})

    async def add_call(self, call: dict[str, Any]) -> None:
        """Send the call of a tool as a block of its own."""
        await self.end()
        await self._begin({**call, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call["input"], ensure_ascii=False)}
        await self._delta(delta)
        await self.send("content_block_stop", index=self._index)

    async def end(self) -> None:
        """End the last block if it is text or reasoning."""
        kind, self._open_kind = self._open_kind, ""
        if kind == "thinking":
            await self._delta({"type": "signature_delta", "signature": _signature("".join(self._thinking))})
        if kind:
            await self.send("content_block_stop", index=self._index)

    async def _delta(self, delta: dict[str, Any]) -> None:
        await self.send("content_block_delta", index=self._index, delta=delta)

    async def _begin(self, block: dict[str, Any]) -> None:
        self._index += 1
        await self.send("content_block_start", index=self._index, content_block=block)


def _add_part(content: list[dict[str, Any]], part: AnswerPart) -> None:
    """Add a part of an answer to the content of a message."""
    if isinstance(part, ToolCall):
        content.append(_tool_use(part))
        return
    kind, text = ("thinking", part.text) if isinstance(part, Reasoning) else ("text", part)
    if not content or content[-1]["type"] != kind:
        content.append({"type": kind, kind: ""})
    content[-1][kind] += text


def _signature(thinking: str) -> str:
    """Return the signature of a block of reasoning. Clients expect one; this server does not verify it."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return the block of a call."""
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name, "input": call.arguments}
