"""OpenAI's Responses API: `/v1/responses`, without state: the input of a request is its whole conversation."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from aiohttp import web

from radixkv.errors import InvalidRequest
from radixkv.service.field_names import prompt_field_names
from radixkv.service.http.api_request import ApiRequest
from radixkv.service.http.completer import Completer
from radixkv.service.http.completions import CompletionChunk
from radixkv.service.http.event_stream import EventStream
from radixkv.service.http.json_fields import Fields
from radixkv.service.http.openai_requests import ChatPrompt, CompletionOptions, read_breakpoint, read_chat, read_file
from radixkv.service.http.openai_responses import cached_by_tier
from radixkv.service.http.tools import EncodedChat, Tools
from radixkv.service.text.answer_format import AnswerPart, Reasoning
from radixkv.service.text.tool_calls import ToolCall

# The names of fields in this API, by their names in error messages. Those are names of this server or of the API of
# chat completions, because a request is read as one for a chat completion.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    **prompt_field_names("input", "max_output_tokens"),
    "response_format": "text.format",
    "json_schema": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "adapter": "model",
    "salt": "cache_salt",
}
_TEXT_PARTS = ("input_text", "output_text", "text")
# Fields that this API and chat completions have in common.
_COMMON_FIELDS = (
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
    "session_id",
    "kv_hints",
    "explain",
    "request_id",
    "chat_template_kwargs",
    "seed",
    "stream",
)


def read_response(fields: Fields) -> tuple[ChatPrompt, CompletionOptions]:
    """Read a request to `/v1/responses`, by expressing it as a chat.

    Raises:
        InvalidRequest: the message names the field.
    """
    chat = {name: fields.any(name) for name in _COMMON_FIELDS}
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
    items = fields.any("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise InvalidRequest("input: expected text or a list of items, got another value")
    for index, value in enumerate(items):
        _add_item(messages, Fields.of(value, f"input[{index}]"))
    return messages


def _add_item(messages: list[dict[str, Any]], item: Fields) -> None:
    """Add an item of the input: a message, a call of a tool, the result of a call, or earlier reasoning."""
    kind = item.text("type", "message")
    item.ignore("id", "status", "phase")
    if kind == "message":
        role = item.one_of("role", ("user", "assistant", "system", "developer"), "user")
        role = "system" if role == "developer" else role
        content = _content(item.any("content"), item.path_of("content"))
        if role == "assistant" and _is_reasoning_only(messages):
            messages[-1]["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        call = {"name": item.text("name"), "arguments": item.text("arguments", "{}")}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.text("call_id", ""), "type": "function", "function": call})
    elif kind == "function_call_output":
        output = _content(item.any("output"), item.path_of("output"))
        messages.append({"role": "tool", "tool_call_id": item.text("call_id", ""), "content": output})
    elif kind == "reasoning":
        item.ignore("encrypted_content")
        content, summary = _part_texts(item, "content"), _part_texts(item, "summary")
        text = "\n".join(content or summary)
        if text:
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})
    else:
        raise InvalidRequest(
            f"{item.path_of('type')}: expected message, function_call, function_call_output or reasoning, got another "
            "type"
        )
    item.require_no_others()


def _is_reasoning_only(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message has reasoning, and nothing else so far."""
    last = messages[-1] if messages else {}
    return last.keys() == {"role", "content", "reasoning_content"} and last["content"] is None


def _part_texts(item: Fields, name: str) -> list[str]:
    """Return the texts of a list of parts."""
    parts = item.items(name)
    return [Fields.of(each, item.path_of(name)).text("text", "") or "" for each in parts]


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
                f"{part.path_of('type')}: expected input_text or input_file, since models are served for text only, "
                "got another type"
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
    """Return the choice of a tool in the form of a chat."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_tool_choice(each) for each in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(form: Fields | None) -> dict[str, Any] | None:
    if form is None:
        return None
    kind = form.one_of("type", ("text", "json_object", "json_schema"), "text")
    chat_format: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        chat_format["json_schema"] = {"schema": form.any("schema")}
        form.ignore("name", "description", "strict")
    form.require_no_others()
    return chat_format


class ResponsesApi:
    """Answers requests of the Responses API.

    Args:
        completer: completes prompts.
    """

    def __init__(self, completer: Completer) -> None:
        self._completer = completer

    async def responses(self, request: ApiRequest, fields: Fields) -> web.StreamResponse:
        """Answer `POST /v1/responses`."""
        prompt, options = read_response(fields)
        tenant = request.hold(options.generate)
        completer = self._completer
        chat = (await completer.encode(request, prompt)).constrain(options.generate)
        writer = _ResponseWriter(request, chat, options, options.model or completer.limits.model)
        generate = completer.with_prompt(options.generate, chat.token_ids, options.model, tenant)
        chunks = await completer.chunks(request, generate, options.stops, chat.shown_tags, chat.ranges)
        async with contextlib.aclosing(chunks):
            if options.is_streamed:
                return await writer.write_stream(chunks)
            return await writer.write_whole(chunks)


class _ResponseWriter:
    """Writes the response to one request.

    Args:
        request: the request.
        chat: the conversation and the tools of the request.
        options: the options of the request.
        model: the name of the model or adapter that answers.
    """

    def __init__(self, request: ApiRequest, chat: EncodedChat, options: CompletionOptions, model: str) -> None:
        tools = chat.tools
        generate = options.generate
        self._request = request
        self._answer = chat.answer_parts()
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
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
            "tool_choice": _choice_object(tools),
            "tools": [{"type": "function", "strict": False, **each["function"]} for each in tools.definitions],
            "store": False,
            "error": None,
        }

    async def write_whole(self, chunks: AsyncGenerator[CompletionChunk, None]) -> web.StreamResponse:
        """Return the response after the completion has ended."""
        parts: list[AnswerPart] = []
        async for chunk in chunks:
            parts += self._parts(chunk)
        for kind, group in itertools.groupby(parts, type):
            if kind is ToolCall:
                self._output += [_function_call(each) for each in group if isinstance(each, ToolCall)]
            else:
                text = "".join(each.text if isinstance(each, Reasoning) else str(each) for each in group)
                self._output.append(_reasoning(text) if kind is Reasoning else _message(text))
        if self._num_tokens and not self._output:
            self._output.append(_message(""))
        return self._request.json(self._body(chunk))

    async def write_stream(self, chunks: AsyncGenerator[CompletionChunk, None]) -> web.StreamResponse:
        """Send events as text is generated, and return the response."""

        async def send_error(body: Mapping[str, Any]) -> None:
            await items.send_error(body)

        events = self._request.events(send_error)
        items = _Items(events, self._output)
        async for chunk in chunks:
            if not events.has_begun:
                begun_response = {**self._head, "status": "in_progress", "output": [], "usage": None}
                await items.send("response.created", response=begun_response)
                await items.send("response.in_progress", response=begun_response)
            for part in self._parts(chunk):
                if isinstance(part, ToolCall):
                    await items.add_call(_function_call(part))
                else:
                    await items.add_text(part)
        await items.end()
        body = self._body(chunk)
        await items.send(f"response.{body['status']}", response=body)
        return await events.end()

    def _parts(self, chunk: CompletionChunk) -> list[AnswerPart]:
        """Return the new parts of the answer, and count their tokens."""
        was_reasoning = self._answer.is_reasoning
        parts = self._answer.put(chunk.text, is_last=chunk.is_last)
        self._num_tokens += len(chunk.response.token_ids)
        if was_reasoning or self._answer.is_reasoning:
            self._num_reasoning_tokens += len(chunk.response.token_ids)
        return parts

    def _body(self, last: CompletionChunk) -> dict[str, Any]:
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
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage.prompt_tokens + self._num_tokens,
                **last.additions,
            },
        }


def _choice_object(tools: Tools) -> Any:
    """Return the choice of a tool in the form of this API."""
    if tools.forced is not None:
        return {"type": "function", "name": tools.forced}
    if tools.allowed is not None:
        allowed = [{"type": "function", "name": name} for name in tools.allowed]
        return {"type": "allowed_tools", "mode": tools.choice, "tools": allowed}
    return tools.choice


class _Items:
    """Sends the output of a streamed response item by item: reasoning, messages, and tool calls.

    Args:
        events: the response.
        output: complete items are appended to it.
    """

    def __init__(self, events: EventStream, output: list[dict[str, Any]]) -> None:
        self._events = events
        self._output = output
        self._num_events = 0
        self._open_item: dict[str, Any] | None = None  # the message or the reasoning that was begun
        self._texts: list[str] = []  # its text so far

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self._events.send({"type": kind, **fields, "sequence_number": self._num_events}, kind)
        self._num_events += 1

    async def send_error(self, body: Mapping[str, Any]) -> None:
        """Send an event with the error in the body of a response."""
        error = body["error"]
        await self.send("error", code=error["code"], message=error["message"], param=error["param"])

    async def add_text(self, part: str | Reasoning) -> None:
        """Send text or reasoning, in the item that was begun if it is of this kind, or else in a new one."""
        if self._open_item is None or (self._open_item["type"] == "reasoning") is not isinstance(part, Reasoning):
            await self.end()
            item = _reasoning("") if isinstance(part, Reasoning) else _message("")
            self._open_item = {**item, "status": "in_progress", "content": []}
            await self.send("response.output_item.added", output_index=len(self._output), item=self._open_item)
            await self.send("response.content_part.added", **self._content_place(), part=item["content"][0])
        if isinstance(part, Reasoning):
            self._texts.append(part.text)
            await self.send("response.reasoning_text.delta", **self._content_place(), delta=part.text)
        else:
            self._texts.append(part)
            await self.send("response.output_text.delta", **self._content_place(), delta=part, logprobs=[])

    async def add_call(self, call: dict[str, Any]) -> None:
        """Send the call of a tool."""
        await self.end()
        index, item_id = len(self._output), call["id"]
        started_call = {**call, "arguments": "", "status": "in_progress"}
        await self.send("response.output_item.added", output_index=index, item=started_call)
        place = {"output_index": index, "item_id": item_id}
        await self.send("response.function_call_arguments.delta", **place, delta=call["arguments"])
        done = {**place, "name": call["name"], "arguments": call["arguments"]}
        await self.send("response.function_call_arguments.done", **done)
        self._output.append(call)
        await self.send("response.output_item.done", output_index=index, item=call)

    async def end(self) -> None:
        """End the item that was begun."""
        if self._open_item is None:
            return
        text = "".join(self._texts)
        if self._open_item["type"] == "reasoning":
            await self.send("response.reasoning_text.done", **self._content_place(), text=text)
            part = _reasoning_part(text)
        else:
            await self.send("response.output_text.done", **self._content_place(), text=text, logprobs=[])
            part = _text_part(text)
        await self.send("response.content_part.done", **self._content_place(), part=part)
        item = {**self._open_item, "status": "completed", "content": [part]}
        self._output.append(item)
        self._open_item = None
        self._texts.clear()
        await self.send("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _content_place(self) -> Mapping[str, Any]:
        assert self._open_item is not None, "an item was begun"
        return {"item_id": self._open_item["id"], "output_index": len(self._output), "content_index": 0}


def _reasoning(text: str) -> dict[str, Any]:
    return {
        "id": f"rs_{secrets.token_hex(12)}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [_reasoning_part(text)],
    }


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


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
