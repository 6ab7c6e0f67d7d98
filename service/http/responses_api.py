"""OpenAI's Responses API: `/v1/responses`, without state: the input of a request is its whole conversation."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from aiohttp import web

from radixkv.api.limits import Limits
from radixkv.errors import InvalidRequest
from radixkv.service.http.api_request import ApiRequest
from radixkv.service.http.breakpoints import Retain, retained_chunks
from radixkv.service.http.completions import Servicer, TextChunk, complete_request, text_chunks
from radixkv.service.http.documents import read_file
from radixkv.service.http.event_stream import EventStream
from radixkv.service.http.json_fields import Fields
from radixkv.service.http.openai_requests import ChatPrompt, CompletionOptions, read_breakpoint, read_chat
from radixkv.service.http.openai_responses import cached_by_tier
from radixkv.service.http.prompts import PromptEncoder
from radixkv.service.http.tools import CompletionSplitter
from radixkv.service.text.tool_calls import ToolCall

# Names of fields of a chat, in which a request is expressed, and their names here.
NAMES = {
    "messages": "input",
    "prefill.token_ids": "input",
    "token_ids": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "response_format": "text.format",
    "json_schema": "text.format",
    "verbosity": "text.verbosity",
    "adapter": "model",
    "salt": "cache_salt",
}
_TEXT_PARTS = ("input_text", "output_text", "text")
_SAME = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "service_tier",
    "metadata",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "cache_salt",
    "chat_template_kwargs",
    "seed",
    "stream",
)


def read_response(fields: Fields) -> tuple[ChatPrompt, CompletionOptions]:
    """Read a request to `/v1/responses`, by expressing it as a chat.

    Raises:
        InvalidRequest: the message names the field.
    """
    chat = {name: fields.any(name) for name in _SAME}
    chat["messages"] = _messages(fields)
    chat["max_completion_tokens"] = fields.any("max_output_tokens")
    chat["tools"] = [_tool(Fields.of(each, f"tools[{index}]")) for index, each in enumerate(fields.items("tools"))]
    chat["tool_choice"] = _tool_choice(fields.any("tool_choice"))
    reasoning = fields.inner("reasoning")
    if reasoning is not None:
        chat["reasoning_effort"] = reasoning.text("effort")
        reasoning.ignore("summary", "generate_summary", "context")
        reasoning.require_no_others()
    text = fields.inner("text")
    if text is not None:
        chat["response_format"] = _format(text.inner("format"))
        chat["verbosity"] = text.text("verbosity")
        text.require_no_others()
    fields.ignore("stream_options", "include", "truncation", "max_tool_calls")
    fields.require_neutral(
        "this server stores no responses",
        store=False,
        background=False,
        previous_response_id=(),
        conversation=(),
        prompt=(),
    )
    fields.require_neutral("log probabilities are in chat completions", top_logprobs=0)
    fields.require_no_others()
    return read_chat(Fields(chat))


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    instructions = fields.text("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = fields.any("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input: expected text or a list of items, got another value")
    for index, value in enumerate(given):
        _add_item(messages, Fields.of(value, f"input[{index}]"), f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Fields, place: str) -> None:
    """Add an item of the input: a message, a call of a tool, its result, or earlier reasoning, which is left out."""
    kind = item.text("type", "message")
    item.ignore("id", "status", "phase")
    if kind == "message":
        role = item.one_of("role", ("user", "assistant", "system", "developer"), "user")
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": _content(item.any("content"), f"{place}.content")})
    elif kind == "function_call":
        call = {"name": item.text("name"), "arguments": item.text("arguments", "{}")}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.text("call_id", ""), "type": "function", "function": call})
    elif kind == "function_call_output":
        output = _content(item.any("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.text("call_id", ""), "content": output})
    elif kind == "reasoning":
        item.ignore("summary", "content", "encrypted_content")
    else:
        raise InvalidRequest(f"{place}.type: expected message, function_call, function_call_output or reasoning")
    item.require_no_others()


def _content(content: Any, place: str) -> Any:
    """Return the content of a message in the form of a chat."""
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise InvalidRequest(f"{place}: expected text or a list of parts, got another value")
        return content
    parts: list[dict[str, Any]] = []
    for index, value in enumerate(content):
        part = Fields.of(value, f"{place}[{index}]")
        kind = part.text("type")
        if kind == "input_file":
            part.ignore("detail")
            read_file(part)
            names = ("file_data", "file_id", "file_url", "filename")
            parts.append({"type": "file", "file": {name: part.any(name) for name in names}})
        elif kind in _TEXT_PARTS:
            parts.append({"type": "text", "text": part.text("text", "")})
        else:
            raise InvalidRequest(
                f"{place}[{index}].type: expected input_text or input_file, since models are served for text only"
            )
        control = part.any("prompt_cache_breakpoint")
        if control is not None:
            read_breakpoint(control, part.path_of("prompt_cache_breakpoint"))
            parts[-1]["prompt_cache_breakpoint"] = control
        part.ignore("annotations", "logprobs")
        part.require_no_others()
    return parts


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type") != "function":
        raise InvalidRequest(f"{tool.path_of('type')}: expected function, got a tool that OpenAI's servers run")
    function = {name: tool.any(name) for name in ("name", "description", "parameters", "strict")}
    tool.ignore("allowed_callers", "defer_loading", "output_schema")
    tool.require_no_others()
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: Fields | None) -> dict[str, Any] | None:
    if form is None:
        return None
    kind = form.one_of("type", ("text", "json_object", "json_schema"), "text")
    found: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        found["json_schema"] = {"schema": form.any("schema")}
        form.ignore("name", "description", "strict")
    form.require_no_others()
    return found


class ResponsesApi:
    """Answers requests of the Responses API.

    Args:
        servicer: generates completions.
        retain: retains a range for some time.
        encoder: encodes prompts.
        limits: of the engine.
    """

    def __init__(self, servicer: Servicer, retain: Retain, encoder: PromptEncoder, limits: Limits) -> None:
        self._servicer = servicer
        self._retain = retain
        self._encoder = encoder
        self._limits = limits

    async def responses(self, request: ApiRequest, fields: Fields) -> web.StreamResponse:
        """Answer `POST /v1/responses`."""
        prompt, options = read_response(fields)
        tenant = request.hold(options.generate)
        token_ids, ranges = await self._encoder.encode(request.num_bytes, "messages", prompt.encode)
        generate = complete_request(options.generate, token_ids, options.model, tenant, self._limits)
        tokenizer = await self._encoder.tokenizer()
        answer = _Answer(request, prompt, options, options.model or self._limits.model)
        chunks = text_chunks(self._servicer, generate, request.call, tokenizer, options.stops)
        retaining = retained_chunks(chunks, ranges, generate.prefill, self._retain, request.call)
        async with contextlib.aclosing(retaining):
            return await (answer.stream(retaining) if options.is_streamed else answer.whole(retaining))


class _Answer:
    """Writes the response to one request.

    Args:
        request: the request.
        prompt: its conversation and tools.
        options: its options.
        model: the name of the model or adapter that answers.
    """

    def __init__(self, request: ApiRequest, prompt: ChatPrompt, options: CompletionOptions, model: str) -> None:
        tools = prompt.tools
        generate = options.generate
        self._request = request
        self._splitter = CompletionSplitter(tools)
        self._num_tokens = 0
        self._output: list[dict[str, Any]] = []
        self._head = {
            "id": f"resp_{request.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "max_output_tokens": generate.max_new_tokens if generate.HasField("max_new_tokens") else None,
            "temperature": round(generate.temperature, 6),
            "top_p": round(generate.top_p, 6) if generate.HasField("top_p") else 1.0,
            "parallel_tool_calls": tools.is_parallel,
            "tool_choice": tools.choice
            if tools.choice in ("none", "auto", "required")
            else {"type": "function", "name": tools.choice},
            "tools": [{"type": "function", "strict": False, **each["function"]} for each in tools.definitions],
            "store": False,
            "error": None,
        }

    async def whole(self, chunks: AsyncGenerator[TextChunk, None]) -> web.StreamResponse:
        """Return the response after the completion has ended."""
        pieces = []
        async for chunk in chunks:
            self._num_tokens += len(chunk.response.token_ids)
            pieces.append(chunk.text)
        text, calls = self._splitter.put("".join(pieces), is_last=True)
        if text or (self._num_tokens and not calls):
            self._output.append(_message(text))
        self._output += [_function_call(call) for call in calls]
        return self._request.json(self._body(chunk))

    async def stream(self, chunks: AsyncGenerator[TextChunk, None]) -> web.StreamResponse:
        """Send events as text is generated, and return the response."""
        events = self._request.events(lambda body: items.send_error(body))
        items = _Items(events, self._output)
        async for chunk in chunks:
            if not events.has_begun:
                begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
                await items.send("response.created", response=begun)
                await items.send("response.in_progress", response=begun)
            self._num_tokens += len(chunk.response.token_ids)
            text, calls = self._splitter.put(chunk.text, is_last=chunk.is_last)
            if text:
                await items.add_text(text)
            for call in calls:
                await items.add_call(_function_call(call))
        await items.end()
        body = self._body(chunk)
        await items.send(f"response.{body['status']}", response=body)
        return await events.end()

    def _body(self, last: TextChunk) -> dict[str, Any]:
        """Return the whole response."""
        usage = last.response.usage
        incomplete = {"reason": "max_output_tokens"} if last.has_reached_length else None
        return {
            **self._head,
            "status": "incomplete" if incomplete else "completed",
            "incomplete_details": incomplete,
            "output": self._output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": usage.written_tokens,
                    "cached_by_tier": cached_by_tier([usage]),
                    "miss_reason": last.miss_reason,
                },
                "output_tokens": self._num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + self._num_tokens,
            },
        }


class _Items:
    """Sends the output of a streamed response item by item: messages, and calls of tools.

    Args:
        events: the response.
        output: gets the items that are complete.
    """

    def __init__(self, events: EventStream, output: list[dict[str, Any]]) -> None:
        self._events = events
        self._output = output
        self._num_events = 0
        self._message: dict[str, Any] | None = None
        self._pieces: list[str] = []

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self._events.send({"type": kind, **fields, "sequence_number": self._num_events}, kind)
        self._num_events += 1

    async def send_error(self, body: Mapping[str, Any]) -> None:
        """Send an event with the error in the body of a response."""
        error = body["error"]
        await self.send("error", code=error["code"], message=error["message"], param=error["param"])

    async def add_text(self, text: str) -> None:
        """Send text, in the message that was begun, or else in a new one."""
        if self._message is None:
            self._message = {**_message(""), "status": "in_progress", "content": []}
            await self.send("response.output_item.added", output_index=len(self._output), item=self._message)
            await self.send("response.content_part.added", **self._place(), part=_text_part(""))
        self._pieces.append(text)
        await self.send("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    async def add_call(self, call: dict[str, Any]) -> None:
        """Send the call of a tool."""
        await self.end()
        index, item_id = len(self._output), call["id"]
        begun = {**call, "arguments": "", "status": "in_progress"}
        await self.send("response.output_item.added", output_index=index, item=begun)
        place = {"output_index": index, "item_id": item_id}
        await self.send("response.function_call_arguments.delta", **place, delta=call["arguments"])
        done = {**place, "name": call["name"], "arguments": call["arguments"]}
        await self.send("response.function_call_arguments.done", **done)
        self._output.append(call)
        await self.send("response.output_item.done", output_index=index, item=call)

    async def end(self) -> None:
        """End the message that was begun."""
        if self._message is None:
            return
        text = "".join(self._pieces)
        await self.send("response.output_text.done", **self._place(), text=text, logprobs=[])
        await self.send("response.content_part.done", **self._place(), part=_text_part(text))
        message = {**self._message, "status": "completed", "content": [_text_part(text)]}
        self._output.append(message)
        self._message = None
        self._pieces.clear()
        await self.send("response.output_item.done", output_index=len(self._output) - 1, item=message)

    def _place(self) -> Mapping[str, Any]:
        assert self._message is not None, "a message was begun"
        return {"item_id": self._message["id"], "output_index": len(self._output), "content_index": 0}


def _message(text: str) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _function_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{secrets.token_hex(12)}",
        "type": "function_call",
        "status": "completed",
        "call_id": f"call_{secrets.token_hex(12)}",
        "name": call.name,
        "arguments": json.dumps(call.arguments, ensure_ascii=False),
    }
