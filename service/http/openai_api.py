"""OpenAI's API: chat completions and completions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from radixkv.api.limits import Limits
from radixkv.errors import InvalidRequest, PromptTooLong, UnknownAdapter
from radixkv.service.field_names import prompt_field_names
from radixkv.service.http.api_request import ApiRequest
from radixkv.service.http.breakpoints import RetainedRange
from radixkv.service.http.completer import Completer
from radixkv.service.http.completions import CompletionChunk, merge_chunks
from radixkv.service.http.json_fields import Fields
from radixkv.service.http.openai_requests import CompletionOptions, read_chat, read_completion
from radixkv.service.http.openai_responses import (
    chat_logprobs,
    completion_logprobs,
    error_body,
    error_object,
    finish_reason,
    usage_object,
)
from radixkv.service.http.responses_api import NAMES as RESPONSE_FIELD_NAMES
from radixkv.service.http.tools import EncodedChat
from radixkv.service.server.servicers.response_writer import row_slices
from radixkv.service.text.answer_format import AnswerPart, AnswerParts, Reasoning
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.text.tool_calls import ToolCall
from radixkv.v1.prefill_pb2 import GenerateRequest, TokenLogprobs, Usage

# The names of fields in OpenAI's API, by their names in messages of this server.
_FIELD_NAMES = {"adapter": "model", "salt": "cache_salt", "json_schema": "response_format"}
_CHAT_FIELD_NAMES = {**_FIELD_NAMES, **prompt_field_names("messages", "max_completion_tokens")}
_COMPLETION_FIELD_NAMES = {**_FIELD_NAMES, **prompt_field_names("prompt", "max_tokens")}


class OpenAIApi:
    """Answers requests of OpenAI's API.

    Args:
        completer: completes prompts.
    """

    def __init__(self, completer: Completer) -> None:
        self._completer = completer

    def error(self, path: str, error: BaseException) -> Mapping[str, Any]:
        """Return the body of the response to a request that failed."""
        if isinstance(error, UnknownAdapter):
            message = self._completer.unknown_model_message
            return error_object(message, 404, "model", "model_not_found")
        names = {"/v1/chat/completions": _CHAT_FIELD_NAMES, "/v1/responses": RESPONSE_FIELD_NAMES}
        return error_body(error, names.get(path, _COMPLETION_FIELD_NAMES))

    async def chat_completions(self, request: ApiRequest, fields: Fields) -> web.StreamResponse:
        """Answer `POST /v1/chat/completions`."""
        prompt, options = read_chat(fields)
        tenant = request.hold(options.generate)
        chat = (await self._completer.encode(request, prompt)).constrain(options.generate)
        body_format = _ChatFormat(chat, prompt.has_reasoning)
        generate = self._completer.with_prompt(options.generate, chat.token_ids, options.model, tenant)
        return await self._answer(request, options, body_format, [generate], chat.ranges)

    async def completions(self, request: ApiRequest, fields: Fields) -> web.StreamResponse:
        """Answer `POST /v1/completions`."""
        prompts, options = read_completion(fields)
        tenant = request.hold(options.generate)
        requests = []
        for prompt in prompts:
            encode = partial(_encode_prompt, prompt, self._completer.limits)
            token_ids = await self._completer.encoder.encode(request.num_bytes, "prompt", encode)
            generate = GenerateRequest()
            generate.CopyFrom(options.generate)
            requests.append(self._completer.with_prompt(generate, token_ids, options.model, tenant))
        return await self._answer(request, options, _CompletionFormat(), requests)

    async def _answer(
        self,
        request: ApiRequest,
        options: CompletionOptions,
        body_format: _ChatFormat | _CompletionFormat,
        requests: Sequence[GenerateRequest],
        ranges: Sequence[RetainedRange] = (),
    ) -> web.StreamResponse:
        completer = self._completer
        tokenizer = await completer.encoder.tokenizer()
        writer = _ResponseWriter(request, options, tokenizer, body_format, options.model or completer.limits.model)
        streams = [
            await completer.chunks(request, each, options.stops, body_format.shown_tags, ranges) for each in requests
        ]
        async with contextlib.aclosing(merge_chunks(streams)) as chunks:
            if options.is_streamed:
                return await writer.write_stream(chunks)
            return await writer.write_whole(chunks, len(streams))


def _encode_prompt(prompt: str | list[Any], limits: Limits, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt that is text, or a list that should contain token ids."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if len(prompt) > limits.max_prompt_tokens:
        raise PromptTooLong(f"prompt: expected at most {limits.max_prompt_tokens} tokens, got {len(prompt)}")
    if not all(type(each) is int and 0 <= each < 2**32 for each in prompt):
        raise InvalidRequest("prompt: expected token ids, got other values among them")
    return prompt


@dataclass(slots=True)
class _Choice:
    """One completion of a response so far."""

    parts: list[AnswerPart] = field(default_factory=list)
    num_tokens: int = 0
    num_chars: int = 0  # characters of the tokens whose log probabilities were streamed
    rows: list[tuple[int, TokenLogprobs]] = field(default_factory=list)  # token ids with their log probabilities
    finish_reason: str | None = None


class _ChatFormat:
    """The format of a chat completion.

    Args:
        chat: the conversation.
        has_reasoning: whether the response contains the reasoning.

    Attributes:
        object, chunk_object: the type of a whole response, and the type of a chunk of a streamed one.
        id_prefix: the beginning of the id of a response.
        shown_tags: texts of special tokens that are a part of the text, by their ids.
        num_reasoning_tokens: tokens of reasoning so far, in all completions; None if the model does not reason.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, chat: EncodedChat, has_reasoning: bool) -> None:
        self.shown_tags: Mapping[int, str] = chat.shown_tags
        self.num_reasoning_tokens = 0 if chat.has_parts and chat.form.reasoning is not None else None
        self._chat = chat
        self._has_parts = chat.has_parts
        self._has_reasoning = has_reasoning
        self._answers: dict[int, AnswerParts] = {}
        self._num_calls: Counter[int] = Counter()  # calls that were written, by completion

    def parts(self, index: int, chunk: CompletionChunk) -> list[AnswerPart]:
        """Return the new parts of a completion."""
        if not self._has_parts:
            return [chunk.text] if chunk.text else []
        if index not in self._answers:
            self._answers[index] = self._chat.answer_parts()
        answer = self._answers[index]
        was_reasoning = answer.is_reasoning
        parts = answer.put(chunk.text, is_last=chunk.is_last)
        if self.num_reasoning_tokens is not None and (was_reasoning or answer.is_reasoning):
            self.num_reasoning_tokens += len(chunk.response.token_ids)
        return [each for each in parts if self._has_reasoning or not isinstance(each, Reasoning)]

    def choice(self, index: int, choice: _Choice, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return a whole completion."""
        text, calls = _text_of(choice.parts), self._calls(index, choice.parts)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        message |= _reasoning_fields(choice.parts)
        if calls:
            message["tool_calls"] = [{name: value for name, value in each.items() if name != "index"} for each in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(index, choice.finish_reason),
        }

    def chunk_choice(
        self, index: int, parts: Sequence[AnswerPart], logprobs: Any, reason: str | None, *, is_first: bool
    ) -> dict[str, Any]:
        """Return the choice of a chunk. A call is in one chunk, as soon as it is complete."""
        delta: dict[str, Any] = {}
        if is_first:
            delta = {"role": "assistant", "content": None if self._has_parts else ""}
        text = _text_of(parts)
        if text:
            delta["content"] = text
        if self._has_parts:
            delta |= _reasoning_fields(parts)
            calls = self._calls(index, parts)
            if calls:
                delta["tool_calls"] = calls
            reason = self._finish_reason(index, reason)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, rows: Sequence[tuple[int, TokenLogprobs]], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
        """Return the log probabilities of tokens."""
        return chat_logprobs(rows, tokenizer)

    def _calls(self, index: int, parts: Sequence[AnswerPart]) -> list[dict[str, Any]]:
        """Return the calls among new parts of a completion, and count them."""
        calls = [each for each in parts if isinstance(each, ToolCall)]
        first_index = self._num_calls[index]
        self._num_calls[index] += len(calls)
        return [_call_object(call, call_index) for call_index, call in enumerate(calls, start=first_index)]

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._num_calls[index] else reason


def _text_of(parts: Sequence[AnswerPart]) -> str:
    return "".join(each for each in parts if isinstance(each, str))


def _reasoning_fields(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """Return the fields with reasoning: clients of DeepSeek's API read the first one, clients of vLLM the second."""
    text = "".join(each.text for each in parts if isinstance(each, Reasoning))
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call_object(call: ToolCall, index: int) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "index": index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


class _CompletionFormat:
    """The format of a completion of `/v1/completions`; see `_ChatFormat`."""

    object = chunk_object = "text_completion"
    id_prefix = "cmpl-"
    shown_tags: Mapping[int, str] = {}
    num_reasoning_tokens = None

    def parts(self, index: int, chunk: CompletionChunk) -> list[AnswerPart]:
        """Return the new parts of a completion."""
        return [chunk.text] if chunk.text else []

    def choice(self, index: int, choice: _Choice, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return a whole completion."""
        return {
            "index": index,
            "text": _text_of(choice.parts),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def chunk_choice(
        self, index: int, parts: Sequence[AnswerPart], logprobs: Any, reason: str | None, *, is_first: bool
    ) -> dict[str, Any]:
        """Return the choice of a chunk."""
        return {"index": index, "text": _text_of(parts), "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, rows: Sequence[tuple[int, TokenLogprobs]], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
        """Return the log probabilities of tokens."""
        return completion_logprobs(rows, tokenizer, offset)


class _ResponseWriter:
    """Writes the response to one request.

    Args:
        request: the request.
        options: the options of the request.
        tokenizer: tokenizer of the model.
        body_format: format of the response.
        model: the name of the model or adapter that answers.
    """

    def __init__(
        self,
        request: ApiRequest,
        options: CompletionOptions,
        tokenizer: Tokenizer,
        body_format: _ChatFormat | _CompletionFormat,
        model: str,
    ) -> None:
        self._request = request
        self._options = options
        self._tokenizer = tokenizer
        self._format = body_format
        self._head = {"id": body_format.id_prefix + request.request_id, "created": int(time.time()), "model": model}
        self._num_completions = max(1, options.generate.n)
        self._has_logprobs = options.generate.HasField("logprobs")
        self._choices: dict[int, _Choice] = {}
        self._usages: dict[int, tuple[Usage, str | None]] = {}  # by prompt
        # What this server adds to the usage: of several prompts, only for the one whose first completion ended last.
        self._additions: dict[str, Any] = {}

    async def write_whole(
        self, chunks: AsyncGenerator[tuple[int, CompletionChunk], None], num_prompts: int
    ) -> web.StreamResponse:
        """Return the response after all completions have ended."""
        async for prompt_index, chunk in chunks:
            index, choice = self._add_counts(prompt_index, chunk)
            choice.parts += self._format.parts(index, chunk)
            if self._has_logprobs:
                choice.rows += zip(chunk.response.token_ids, chunk.response.logprobs, strict=False)
        choices = []
        for index in range(num_prompts * self._num_completions):
            choice = self._choices[index]
            logprobs = self._format.logprobs(choice.rows, self._tokenizer, 0) if self._has_logprobs else None
            choices.append(self._format.choice(index, choice, logprobs))
        return self._request.json(
            {**self._head, "object": self._format.object, "choices": choices, "usage": self._usage()}
        )

    async def write_stream(self, chunks: AsyncGenerator[tuple[int, CompletionChunk], None]) -> web.StreamResponse:
        """Send chunks as they are generated, and return the response."""
        events = self._request.events()
        async for prompt_index, chunk in chunks:
            index, choice = self._add_counts(prompt_index, chunk)
            rows = list(zip(chunk.response.token_ids, chunk.response.logprobs, strict=False))
            is_first = choice.num_tokens == len(chunk.response.token_ids)
            parts = self._format.parts(index, chunk)
            if not (parts or chunk.is_last or is_first or rows):
                continue  # the text is held back: a part of a character, or of a possible stop string or call

            # If the client reads slowly, many tokens are sent together, and their log probabilities in several chunks.
            # The last of these chunks also has the text.
            row_groups = [rows[row_slice] for row_slice in row_slices(chunk.response.logprobs)] or [[]]
            for row_group in row_groups[:-1]:
                logprobs = self._logprobs(choice, row_group)
                chunk_choice = self._format.chunk_choice(index, [], logprobs, None, is_first=is_first)
                await events.send(self._chunk([chunk_choice]))
                await asyncio.sleep(0)  # so that other calls do not wait for all of these chunks
                is_first = False

            reasoning: list[AnswerPart] = [each for each in parts if isinstance(each, Reasoning)]
            other_parts: list[AnswerPart] = [each for each in parts if not isinstance(each, Reasoning)]
            if reasoning and other_parts:  # clients read only one of them in a chunk
                chunk_choice = self._format.chunk_choice(index, reasoning, None, None, is_first=is_first)
                await events.send(self._chunk([chunk_choice]))
                parts, is_first = other_parts, False

            logprobs = self._logprobs(choice, row_groups[-1])
            chunk_choice = self._format.chunk_choice(index, parts, logprobs, choice.finish_reason, is_first=is_first)
            await events.send(self._chunk([chunk_choice]))
        if self._options.has_usage_chunk:
            await events.send({**self._chunk([]), "usage": self._usage()})
        await events.send("[DONE]")
        return await events.end()

    def _logprobs(self, choice: _Choice, rows: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any] | None:
        """Return the log probabilities of the next tokens of a streamed completion; None if they are not requested."""
        if not self._has_logprobs:
            return None
        logprobs = self._format.logprobs(rows, self._tokenizer, choice.num_chars)
        choice.num_chars += sum(len(self._tokenizer.token_text(token_id)) for token_id, _ in rows)
        return logprobs

    def _chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self._format.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self._options.has_usage_chunk else chunk

    def _add_counts(self, prompt_index: int, chunk: CompletionChunk) -> tuple[int, _Choice]:
        """Add the counts of a chunk to its choice. Returns the index of the choice, and the choice."""
        index = prompt_index * self._num_completions + chunk.index
        choice = self._choices.setdefault(index, _Choice())
        choice.num_tokens += len(chunk.response.token_ids)
        choice.finish_reason = finish_reason(chunk)
        if chunk.is_last and chunk.index == 0:
            self._usages[prompt_index] = chunk.response.usage, chunk.miss_reason
            self._additions = chunk.additions
        return index, choice

    def _usage(self) -> dict[str, Any]:
        num_generated = sum(each.num_tokens for each in self._choices.values())
        usage = usage_object(self._usages.values(), num_generated, self._format.num_reasoning_tokens)
        return {**usage, **self._additions}
