"""What OpenAI and Anthropic document, with their own clients: each row is one documented behavior.

A row of the tables of responses has the behavior, a request, the path of a field in the response, and what that field
must have: a value, a type, a pattern that it matches, or the same value as in the response to another request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from radixkv.service.client import Client, Tokenizer
from tests.patience import PATIENCE_S, wait_until
from tests.whole.http_server import anthropic_client, openai_client, serving_http, write_model

pytestmark = pytest.mark.usefixtures("forked_servers")

# ChatML with documents, tools in the format of Hermes and Qwen, and the option of Qwen 3 that switches reasoning off.
TEMPLATE = """{%- for document in documents or [] %}<doc>{{ document.title }}: {{ document.text }}</doc>
{% endfor %}{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}{% set call = call.function or call %}<tool_call>
{{ {'name': call.name, 'arguments': call.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}{% endif %}"""
HELLO: Any = [{"role": "user", "content": "Hello"}]
HELLO_TOKENS = 17  # of the prompt that the template makes of HELLO, with reasoning
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "weather", "description": "The weather now.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: Any = [{"type": "function", "strict": False, **FUNCTION}]
CLAUDE_TOOLS: Any = [{"name": "weather", "description": "The weather now.", "input_schema": SCHEMA}]
NAMED_TOOL = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
DATA_URL = "data:text/plain;base64,Uk9TRVM="  # ROSES
EXPLICIT = {"mode": "explicit"}
EPHEMERAL = {"type": "ephemeral"}
RETAIN = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": {"priority": 70}}
HINTS = {"protocol_version": "1.0", "message_id": "m", "actions": [RETAIN]}
FOLLOWS_SCHEMA = re.compile(r'\{\s*"a"\s*:\s*[12]\s*\}')


@dataclass
class Served:
    """The clients of a server.

    Attributes:
        responses: the response to each request so far, by its `repr`.
    """

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    grpc: Client
    tokenizer: Tokenizer
    responses: dict[str, Any] = field(default_factory=dict)

    def response_to(self, request: Request) -> Any:
        """Return the response to a request as JSON, or the list of its events. Equal requests are sent once."""
        key = repr(request)
        if key not in self.responses:
            self.responses[key] = as_json(request.send(self))
        return self.responses[key]


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        method: the method of a client that sends the request, such as `openai.chat.completions.create`.
        fields: the arguments of the method.
    """

    method: str
    fields: dict[str, Any]

    def send(self, served: Served) -> Any:
        """Send the request, and return what the client returns."""
        method: Any = served
        for name in self.method.split("."):
            method = getattr(method, name)
        return method(**self.fields)


def as_json(response: Any) -> Any:
    """Return a response as JSON, or the list of its events."""
    if isinstance(response, openai.Stream | anthropic.Stream):
        return [event.to_dict(mode="json") for event in response]
    return {**response.to_dict(mode="json"), "_request_id": getattr(response, "_request_id", None)}


def chat(**fields: Any) -> Request:
    defaults = {"model": "tiny", "messages": HELLO, "temperature": 0}
    if not fields.keys() & {"max_tokens", "max_completion_tokens"}:
        defaults["max_completion_tokens"] = 6
    return Request("openai.chat.completions.create", {**defaults, **fields})


def completion(**fields: Any) -> Request:
    return Request("openai.completions.create", {"model": "tiny", "prompt": "Hello", "temperature": 0, **fields})


def response(**fields: Any) -> Request:
    defaults = {"model": "tiny", "input": "Hello", "max_output_tokens": 6, "temperature": 0}
    return Request("openai.responses.create", {**defaults, **fields})


def message(**fields: Any) -> Request:
    body = {"temperature": 0, **fields.pop("extra_body", {})}
    defaults = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "extra_body": body}
    return Request("anthropic.messages.create", {**defaults, **fields})


def token_count(**fields: Any) -> Request:
    return Request("anthropic.messages.count_tokens", {"model": "tiny", "messages": HELLO, **fields})


def text_part(text: str, **fields: Any) -> dict[str, Any]:
    """Return a text of a message's content, with further fields such as a breakpoint."""
    return {"type": "text", "text": text, **fields}


def user_message(*parts: Any) -> Any:
    """Return the messages of a chat with one message."""
    return [{"role": "user", "content": list(parts)}]


def select(value: Any, path: str) -> Any:
    """Return a part of JSON.

    A path consists of names and positions with dots between them. `*` means each element of a list, `#` the length of a
    list, and the empty path the whole value.
    """
    if not path:
        return value
    name, _, rest = path.partition(".")
    if name == "*":
        return [select(each, rest) for each in value]
    if name == "#":
        return len(value)
    inner = value[int(name)] if isinstance(value, list) else value.get(name)
    return select(inner, rest)


def response_events(*names: str) -> list[str]:
    """Return the types of events in the Responses API."""
    return [f"response.{name}" for name in names]


TOOL_CALL = chat(tools=TOOLS, tool_choice=NAMED_TOOL, max_tokens=200)
STREAM = chat(stream=True)
STREAM_WITH_USAGE = chat(stream=True, stream_options={"include_usage": True})
STREAM_OF_TOOL_CALL = chat(stream=True, tools=TOOLS, tool_choice=NAMED_TOOL, max_tokens=200)
CONTENT, FINISH_REASON = "choices.0.message.content", "choices.0.finish_reason"
TOOL_CALLS = "choices.0.message.tool_calls"
CHAT_WITH_TOOL_RESULT = [
    *HELLO,
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "12"},
]
WITH_FILE = chat(
    messages=user_message(text_part("Hello"), {"type": "file", "file": {"file_data": DATA_URL, "filename": "a.txt"}})
)

CHATS = [
    ("an id has a prefix", chat(), "id", re.compile("chatcmpl-.+")),
    ("the object is named", chat(), "object", "chat.completion"),
    ("the model is named", chat(), "model", "tiny"),
    ("an empty model is the served one", chat(model=""), "model", "tiny"),
    ("created is a number", chat(), "created", int),
    ("the message is the assistant's", chat(), "choices.0.message.role", "assistant"),
    ("refusal is null", chat(), "choices.0.message.refusal", None),
    ("without tools there are no calls", chat(), TOOL_CALLS, None),
    ("logprobs are null by default", chat(), "choices.0.logprobs", None),
    ("at the maximum finish_reason is length", chat(), FINISH_REASON, "length"),
    ("max_completion_tokens counts", chat(max_completion_tokens=9), "usage.completion_tokens", 9),
    ("max_tokens is its older name", chat(max_tokens=4), "usage.completion_tokens", 4),
    ("the newer name prevails", chat(max_tokens=4, max_completion_tokens=5), "usage.completion_tokens", 5),
    ("no tokens only warm the cache", chat(max_completion_tokens=0), CONTENT, ""),
    ("n choices are numbered", chat(n=3), "choices.*.index", [0, 1, 2]),
    ("usage counts all choices", chat(n=3), "usage.completion_tokens", 18),
    ("a stop string ends the answer", chat(stop="e", max_tokens=300), FINISH_REASON, "stop"),
    ("a stop string is left out", chat(stop="e", max_tokens=300), CONTENT, re.compile("[^e]*")),
    ("a stop string may be a special token", chat(stop="<|im_end|>"), FINISH_REASON, "length"),
    ("stop may be a list", chat(stop=["\x01", "\x02"]), FINISH_REASON, "length"),
    ("a seed repeats an answer", chat(seed=3, temperature=1), CONTENT, chat(seed=3, temperature=1, n=1)),
    ("null is absent", chat(stop=None, seed=None, tools=None), CONTENT, chat()),
    ("logit_bias 100 chooses a token", chat(logit_bias={"65": 100}), CONTENT, "AAAAAA"),
    ("logit_bias -100 bans it", chat(logit_bias={"65": -100}), CONTENT, re.compile("[^A]*")),
    ("penalties are accepted", chat(presence_penalty=-2, frequency_penalty=2), FINISH_REASON, "length"),
    ("logprobs have a row per token", chat(logprobs=True), "choices.0.logprobs.content.#", 6),
    (
        "top_logprobs have as many",
        chat(logprobs=True, top_logprobs=2),
        "choices.0.logprobs.content.*.top_logprobs.#",
        [2] * 6,
    ),
    ("a row has bytes", chat(logprobs=True), "choices.0.logprobs.content.0.bytes", list),
    ("content may be parts", chat(messages=user_message(text_part("Hello"))), CONTENT, chat()),
    ("a message may have a name", chat(messages=[{**HELLO[0], "name": "Ada"}]), CONTENT, chat()),
    (
        "a system message is accepted",
        chat(messages=[{"role": "system", "content": "Hi"}, *HELLO]),
        FINISH_REASON,
        "length",
    ),
    ("so is a developer's", chat(messages=[{"role": "developer", "content": "Hi"}, *HELLO]), FINISH_REASON, "length"),
    ("user changes nothing", chat(user="u"), CONTENT, chat()),
    ("metadata changes nothing", chat(metadata={"a": "b"}), CONTENT, chat()),
    ("safety_identifier changes nothing", chat(safety_identifier="s"), CONTENT, chat()),
    ("service_tier auto is accepted", chat(service_tier="auto"), CONTENT, chat()),
    ("store false is accepted", chat(store=False), CONTENT, chat()),
    ("modalities text is accepted", chat(modalities=["text"]), CONTENT, chat()),
    ("response_format text is accepted", chat(response_format={"type": "text"}), CONTENT, chat()),
    ("a schema is followed", chat(response_format=JSON_SCHEMA, max_tokens=200), CONTENT, FOLLOWS_SCHEMA),
    (
        "required calls a tool",
        chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200),
        FINISH_REASON,
        "tool_calls",
    ),
    ("a call has an id", TOOL_CALL, f"{TOOL_CALLS}.0.id", re.compile("call_.+")),
    ("a call has a type", TOOL_CALL, f"{TOOL_CALLS}.*.type", ["function"]),
    ("a named tool is called", TOOL_CALL, f"{TOOL_CALLS}.0.function.name", "weather"),
    ("arguments follow the schema", TOOL_CALL, f"{TOOL_CALLS}.0.function.arguments", FOLLOWS_SCHEMA),
    ("content is null next to a call", TOOL_CALL, CONTENT, None),
    ("none calls no tool", chat(tools=TOOLS, tool_choice="none"), TOOL_CALLS, None),
    (
        "the result of a call is accepted",
        chat(messages=CHAT_WITH_TOOL_RESULT, tools=TOOLS),
        "usage.completion_tokens",
        int,
    ),
    ("prompt_cache_key changes nothing", chat(prompt_cache_key="k"), CONTENT, chat()),
    ("prompt_cache_retention changes nothing", chat(prompt_cache_retention="24h"), CONTENT, chat()),
    (
        "nor do prompt_cache_options",
        chat(prompt_cache_options={"mode": "implicit", "ttl": "30m"}),
        CONTENT,
        chat(),
    ),
    (
        "a breakpoint is not in the prompt",
        chat(messages=user_message(text_part("Hello", prompt_cache_breakpoint=EXPLICIT))),
        "usage.prompt_tokens",
        chat(),
    ),
    ("a text file is a document", WITH_FILE, "usage.prompt_tokens", HELLO_TOKENS + len("<doc>a.txt: ROSES</doc>\n")),
    ("the id of a request is returned", chat(extra_headers={"x-request-id": "mine"}), "_request_id", "mine"),
    ("a request without an id gets one", chat(), "_request_id", str),
    ("a stream has chunks", STREAM, "0.object", "chat.completion.chunk"),
    ("the first chunk has the role", STREAM, "0.choices.0.delta.role", "assistant"),
    ("the last chunk has the reason", STREAM, "-1.choices.0.finish_reason", "length"),
    ("the others have none", STREAM, "0.choices.0.finish_reason", None),
    ("a stream has no usage by default", STREAM, "-1.usage", None),
    ("include_usage adds a chunk without choices", STREAM_WITH_USAGE, "-1.choices", []),
    ("that chunk has the usage", STREAM_WITH_USAGE, "-1.usage.completion_tokens", 6),
    ("the others have null", STREAM_WITH_USAGE, "0.usage", None),
    ("a stream of n choices ends each", chat(stream=True, n=2), "-1.choices.0.finish_reason", "length"),
    ("a stream with a call ends with its reason", STREAM_OF_TOOL_CALL, "-1.choices.0.finish_reason", "tool_calls"),
]
COMPLETIONS = [
    ("an id has a prefix", completion(), "id", re.compile("cmpl-.+")),
    ("the object is named", completion(), "object", "text_completion"),
    ("16 tokens are the default", completion(), "usage.completion_tokens", 16),
    ("a prompt may be token ids", completion(prompt=[72, 101]), "usage.prompt_tokens", 2),
    ("or several texts", completion(prompt=["a", "b"]), "choices.*.index", [0, 1]),
    ("or several lists of token ids", completion(prompt=[[72], [101]]), "usage.prompt_tokens", 2),
    ("n applies to each", completion(prompt=["a", "b"], n=2), "choices.*.index", [0, 1, 2, 3]),
    ("logprobs have tokens", completion(logprobs=0), "choices.0.logprobs.tokens.#", 16),
    ("and their alternatives", completion(logprobs=2), "choices.0.logprobs.top_logprobs.*.#", [2] * 16),
    ("and offsets from the beginning", completion(logprobs=0), "choices.0.logprobs.text_offset.0", 0),
    ("echo false is accepted", completion(echo=False), "choices.0.text", completion()),
    ("best_of 1 is accepted", completion(best_of=1), "choices.0.text", completion()),
    ("an empty suffix is accepted", completion(suffix=""), "choices.0.text", completion()),
    ("a chunk is no other object", completion(stream=True), "0.object", "text_completion"),
    ("the last chunk has the reason", completion(stream=True), "-1.choices.0.finish_reason", "length"),
]
RESPONSE_WITH_CALL = response(
    tools=FLAT_TOOLS, tool_choice={"type": "function", "name": "weather"}, max_output_tokens=200
)
RESPONSES = [
    ("an id has a prefix", response(), "id", re.compile("resp_.+")),
    ("the object is named", response(), "object", "response"),
    ("created_at is a number", response(), "created_at", int | float),
    ("at the maximum a response is incomplete", response(), "status", "incomplete"),
    ("and says why", response(), "incomplete_details.reason", "max_output_tokens"),
    ("error is null", response(), "error", None),
    ("the output is a message", response(), "output.*.type", ["message"]),
    ("its id has a prefix", response(), "output.0.id", re.compile("msg_.+")),
    ("its content is text", response(), "output.0.content.*.type", ["output_text"]),
    ("text has annotations", response(), "output.0.content.0.annotations", []),
    ("options are returned", response(), "max_output_tokens", 6),
    ("output tokens are counted", response(), "usage.output_tokens", 6),
    ("a session is accepted", response(extra_body={"session_id": "s"}), "usage.output_tokens", 6),
    ("hints are answered in usage", response(extra_body={"kv_hints": HINTS}), "usage.kv_hints.*.status", ["accepted"]),
    ("reasoning tokens are counted", response(), "usage.output_tokens_details.reasoning_tokens", 0),
    ("input may be messages", response(input=HELLO), "output.0.content.0.text", response()),
    ("instructions come first", response(instructions="Hi"), "usage.input_tokens", 27),
    ("nothing is stored", response(), "store", False),
    ("a call is an item", RESPONSE_WITH_CALL, "output.*.type", ["function_call"]),
    ("it has an id for its result", RESPONSE_WITH_CALL, "output.0.call_id", re.compile("call_.+")),
    ("its arguments are JSON", RESPONSE_WITH_CALL, "output.0.arguments", FOLLOWS_SCHEMA),
    ("with a call a response is complete", RESPONSE_WITH_CALL, "status", "completed"),
    ("tools are returned", RESPONSE_WITH_CALL, "tools.*.name", ["weather"]),
    (
        "no maximum is null",
        response(**RESPONSE_WITH_CALL.fields | {"max_output_tokens": None}),
        "max_output_tokens",
        None,
    ),
    (
        "a breakpoint is not in the prompt",
        response(input=user_message({"type": "input_text", "text": "Hello", "prompt_cache_breakpoint": EXPLICIT})),
        "usage.input_tokens",
        response(),
    ),
    (
        "a text file is a document",
        response(
            input=user_message({"type": "input_text", "text": "Hello"}, {"type": "input_file", "file_data": DATA_URL})
        ),
        "usage.input_tokens",
        HELLO_TOKENS + len("<doc>: ROSES</doc>\n"),
    ),
    (
        "a stream has this order",
        response(stream=True, max_output_tokens=1),
        "*.type",
        response_events(
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "incomplete",
        ),
    ),
    ("its events are numbered", response(stream=True, max_output_tokens=1), "*.sequence_number", list(range(9))),
]
THINKING = {"type": "adaptive"}
TOOL_USE = message(tools=CLAUDE_TOOLS, tool_choice={"type": "tool", "name": "weather"}, max_tokens=200)
MESSAGE_STREAM = message(stream=True, max_tokens=1)
WITH_DOCUMENT = message(
    messages=user_message({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "ROSES"}})
)
MESSAGES_WITH_TOOL_RESULT = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "12", "is_error": False}]},
]
MESSAGE_TEXT = "content.0.text"
MESSAGES = [
    ("an id has a prefix", message(), "id", re.compile("msg_.+")),
    ("the type is named", message(), "type", "message"),
    ("the role is the assistant", message(), "role", "assistant"),
    ("the model is named", message(), "model", "tiny"),
    ("the content is text", message(), "content.*.type", ["text"]),
    ("at the maximum stop_reason says so", message(), "stop_reason", "max_tokens"),
    ("stop_sequence is null", message(), "stop_sequence", None),
    ("output tokens are counted", message(), "usage.output_tokens", 6),
    ("the tier is named", message(), "usage.service_tier", "standard"),
    ("max_tokens 0 has no content", message(max_tokens=0), "content", []),
    ("max_tokens 0 stops at the maximum", message(max_tokens=0), "stop_reason", "max_tokens"),
    ("a stop sequence is named", message(stop_sequences=["e"], max_tokens=300), "stop_sequence", "e"),
    ("and is the reason", message(stop_sequences=["e"], max_tokens=300), "stop_reason", "stop_sequence"),
    ("and is left out", message(stop_sequences=["e"], max_tokens=300), MESSAGE_TEXT, re.compile("[^e]*")),
    ("content may be blocks", message(messages=user_message(text_part("Hello"))), MESSAGE_TEXT, message()),
    ("system may be blocks", message(system=[text_part("Hi")]), MESSAGE_TEXT, message(system="Hi")),
    ("an empty system is none", message(system=""), MESSAGE_TEXT, message()),
    ("metadata changes nothing", message(metadata={"user_id": "u"}), MESSAGE_TEXT, message()),
    ("service_tier auto is accepted", message(service_tier="auto"), MESSAGE_TEXT, message()),
    ("top_k is accepted", message(extra_body={"top_k": 5}), MESSAGE_TEXT, message()),
    ("thinking may be disabled", message(thinking={"type": "disabled"}), MESSAGE_TEXT, message()),
    (
        "a schema is followed",
        message(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=200),
        MESSAGE_TEXT,
        FOLLOWS_SCHEMA,
    ),
    (
        "cache_control changes no text",
        message(messages=user_message(text_part("Hello", cache_control=EPHEMERAL))),
        MESSAGE_TEXT,
        message(),
    ),
    ("nor does automatic caching", message(cache_control=EPHEMERAL), MESSAGE_TEXT, message()),
    ("a forced tool is used", TOOL_USE, "content.*.type", ["tool_use"]),
    ("a use has an id", TOOL_USE, "content.0.id", re.compile("toolu_.+")),
    ("a use names the tool", TOOL_USE, "content.0.name", "weather"),
    ("its input is an object", TOOL_USE, "content.0.input.a", int),
    ("a use is the reason to stop", TOOL_USE, "stop_reason", "tool_use"),
    (
        "the result of a use is accepted",
        message(messages=MESSAGES_WITH_TOOL_RESULT, tools=CLAUDE_TOOLS),
        "role",
        "assistant",
    ),
    ("a text document is accepted", WITH_DOCUMENT, "role", "assistant"),
    ("tokens are counted", token_count(thinking=THINKING), "input_tokens", HELLO_TOKENS),
    ("without thinking it is off", token_count(), "input_tokens", 24),
    (
        "a document counts",
        token_count(messages=WITH_DOCUMENT.fields["messages"], thinking=THINKING),
        "input_tokens",
        32,
    ),
    ("tools count", token_count(tools=CLAUDE_TOOLS), "input_tokens", int),
    ("the id of a request is returned", message(extra_headers={"x-request-id": "mine"}), "_request_id", "mine"),
    (
        "a stream has this order",
        MESSAGE_STREAM,
        "*.type",
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ],
    ),
    ("it starts with an empty message", MESSAGE_STREAM, "0.message.content", []),
    ("whose reason is null", MESSAGE_STREAM, "0.message.stop_reason", None),
    ("a block starts empty", MESSAGE_STREAM, "1.content_block.text", ""),
    ("blocks are numbered", MESSAGE_STREAM, "1.index", 0),
    ("a delta has a type", MESSAGE_STREAM, "2.delta.type", "text_delta"),
    ("the last delta has the reason", MESSAGE_STREAM, "4.delta.stop_reason", "max_tokens"),
    ("and all output tokens", MESSAGE_STREAM, "4.usage.output_tokens", 1),
    (
        "no tokens stream no block",
        message(stream=True, max_tokens=0),
        "*.type",
        ["message_start", "message_delta", "message_stop"],
    ),
]
NOT_FOUND = {"type": "previous_message_not_found"}
DIAGNOSTICS = [
    ("diagnostics are null by default", message(), "diagnostics", None),
    ("and without a previous message", message(diagnostics={"previous_message_id": None}), "diagnostics", None),
    (
        "an unknown message is not found",
        message(diagnostics={"previous_message_id": "msg_x"}),
        "diagnostics.cache_miss_reason",
        NOT_FOUND,
    ),
    (
        "a stream begins with the diagnostics",
        message(diagnostics={"previous_message_id": "msg_x"}, stream=True),
        "0.message.diagnostics.cache_miss_reason",
        NOT_FOUND,
    ),
]
LIST_MODELS = Request("openai.models.list", {})
LIST_CLAUDE_MODELS = Request("anthropic.models.list", {})
CLAUDE_MODEL = Request("anthropic.models.retrieve", {"model_id": "tiny"})
MODELS = [
    ("OpenAI's list is an object", LIST_MODELS, "object", "list"),
    ("it has the model", LIST_MODELS, "data.*.id", ["tiny"]),
    ("a model is an object", LIST_MODELS, "data.0.object", "model"),
    ("it has an owner", LIST_MODELS, "data.0.owned_by", "radixkv"),
    ("OpenAI's model is found", Request("openai.models.retrieve", {"model": "tiny"}), "id", "tiny"),
    ("Anthropic's list has the model", LIST_CLAUDE_MODELS, "data.*.id", ["tiny"]),
    ("it has no more", LIST_CLAUDE_MODELS, "has_more", False),
    ("it names its first model", LIST_CLAUDE_MODELS, "first_id", "tiny"),
    ("and its last", LIST_CLAUDE_MODELS, "last_id", "tiny"),
    ("nothing follows the last", Request("anthropic.models.list", {"after_id": "tiny"}), "data", []),
    ("Anthropic's model has a type", CLAUDE_MODEL, "type", "model"),
    ("it has a name for people", CLAUDE_MODEL, "display_name", "tiny"),
    ("it has a time in RFC 3339", CLAUDE_MODEL, "created_at", re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")),
    ("it is active", CLAUDE_MODEL, "lifecycle", "active"),
]

BAD = "invalid_request_error"
UNKNOWN = "not_found_error"
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
PDF = {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}}
# Requests for which OpenAI's client raises an error, with the status, type, field and code of that error.
OPENAI_ERRORS: Sequence[tuple[Request, tuple[int, str, str | None, str | None]]] = [
    (chat(model="gpt-x"), (404, UNKNOWN, "model", "model_not_found")),
    (chat(messages=[]), (400, BAD, "messages", None)),
    (chat(messages=[{"role": "user", "content": 5}]), (400, BAD, "messages[0].content", None)),
    (chat(messages=[{"content": "a"}]), (400, BAD, "messages[0].role", None)),
    (chat(messages=user_message(IMAGE)), (400, BAD, "messages[0].content[0]", None)),
    (chat(messages=user_message(PDF)), (400, BAD, "messages[0].content[0].file.file_data", None)),
    (
        chat(messages=user_message({"type": "file", "file": {"file_id": "f"}})),
        (400, BAD, "messages[0].content[0].file.file_id", None),
    ),
    (chat(temperature=2.1), (400, BAD, "temperature", None)),
    (chat(top_p=1.1), (400, BAD, "top_p", None)),
    (chat(presence_penalty=3), (400, BAD, "presence_penalty", None)),
    (chat(frequency_penalty=-3), (400, BAD, "frequency_penalty", None)),
    (chat(n=0), (400, BAD, "n", None)),
    (chat(logprobs=True, top_logprobs=-1), (400, BAD, "top_logprobs", None)),
    (chat(top_logprobs=2), (400, BAD, "top_logprobs", None)),
    (chat(logit_bias={"65": 101}), (400, BAD, "logit_bias.65", None)),
    (chat(max_completion_tokens=-1), (400, BAD, "max_completion_tokens", None)),
    (chat(max_completion_tokens=10**9), (400, BAD, "messages, max_completion_tokens", "context_length_exceeded")),
    (chat(store=True), (400, BAD, "store", None)),
    (chat(modalities=["text", "audio"]), (400, BAD, "modalities", None)),
    (chat(service_tier="flex"), (400, BAD, "service_tier", None)),
    (chat(functions=[{"name": "a"}]), (400, BAD, "functions", None)),
    (chat(stream_options={"include_usage": True}), (400, BAD, "stream_options", None)),
    (chat(response_format={"type": "xml"}), (400, BAD, "response_format.type", None)),
    (chat(response_format={"type": "json_schema"}), (400, BAD, "response_format.json_schema.schema", None)),
    (chat(tool_choice="required"), (400, BAD, "tool_choice", None)),
    (chat(tools=[{"type": "custom"}]), (400, BAD, "tools[0].type", None)),
    (chat(prompt_cache_retention="7d"), (400, BAD, "prompt_cache_retention", None)),
    (chat(prompt_cache_options={"ttl": "1h"}), (400, BAD, "prompt_cache_options.ttl", None)),
    (chat(prompt_cache_options={"mode": "off"}), (400, BAD, "prompt_cache_options.mode", None)),
    (
        chat(messages=user_message(text_part("a", prompt_cache_breakpoint={"mode": "implicit"}))),
        (400, BAD, "messages[0].content[0].prompt_cache_breakpoint.mode", None),
    ),
    (chat(extra_body={"typo": 1}), (400, BAD, "typo", None)),
    (completion(prompt=[]), (400, BAD, "prompt", None)),
    (completion(prompt=[10**6]), (400, BAD, "prompt[0]", None)),
    (completion(prompt=[1] * 140_000), (400, BAD, "prompt", "context_length_exceeded")),
    (completion(echo=True), (400, BAD, "echo", None)),
    (completion(suffix="a"), (400, BAD, "suffix", None)),
    (completion(best_of=2), (400, BAD, "best_of", None)),
    (completion(logprobs=-1), (400, BAD, "logprobs", None)),
    (response(previous_response_id="resp_1"), (400, BAD, "previous_response_id", None)),
    (response(background=True), (400, BAD, "background", None)),
    (response(store=True), (400, BAD, "store", None)),
    (response(input=[]), (400, BAD, "input", None)),
    (response(tools=[{"type": "web_search"}]), (400, BAD, "tools[0].type", None)),
    (
        response(input=user_message({"type": "input_image", "image_url": "a"})),
        (400, BAD, "input[0].content[0].type", None),
    ),
    (
        response(input=user_message({"type": "input_file", "file_url": "a"})),
        (400, BAD, "input[0].content[0].file_url", None),
    ),
    (
        response(input=user_message({"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"ttl": "1h"}})),
        (400, BAD, "input[0].content[0].prompt_cache_breakpoint.ttl", None),
    ),
    (response(max_output_tokens=10**9), (400, BAD, "input, max_output_tokens", "context_length_exceeded")),
    (response(model="gpt-x"), (404, UNKNOWN, "model", "model_not_found")),
    (Request("openai.models.retrieve", {"model": "gpt-x"}), (404, UNKNOWN, None, None)),
    (Request("openai.embeddings.create", {"model": "tiny", "input": "a"}), (404, UNKNOWN, None, None)),
]
TWO_HOURS = {"type": "ephemeral", "ttl": "2h"}
FIVE_BREAKPOINTS = user_message(*[text_part("a", cache_control=EPHEMERAL)] * 5)
# Requests for which Anthropic's client raises an error, with its status, its type, and the beginning of its message.
ANTHROPIC_ERRORS: Sequence[tuple[Request, tuple[int, str, str]]] = [
    (message(model="claude-x"), (404, UNKNOWN, "model: ")),
    (token_count(model="claude-x"), (404, UNKNOWN, "model: ")),
    (message(messages=[]), (400, BAD, "messages: ")),
    (message(messages=[{"role": "system", "content": "a"}]), (400, BAD, "messages[0].role: ")),
    (message(messages=[*HELLO, {"role": "assistant", "content": "a"}]), (400, BAD, "messages: ")),
    (message(messages=user_message(text_part(""))), (400, BAD, "messages[0].content[0].text: ")),
    (message(messages=user_message({"type": "image", "source": {}})), (400, BAD, "messages[0].content[0].type: ")),
    (
        message(messages=user_message({"type": "document", "source": {"type": "base64", "data": ""}})),
        (400, BAD, "messages[0].content[0].source.type: "),
    ),
    (message(max_tokens=-1), (400, BAD, "max_tokens: ")),
    (message(max_tokens=10**9), (400, BAD, "input length and max_tokens exceed context limit: ")),
    (message(messages=user_message(text_part("a" * 140_000))), (400, BAD, "prompt is too long: messages: ")),
    (message(extra_body={"temperature": 1.1}), (400, BAD, "temperature: ")),
    (message(extra_body={"typo": 1}), (400, BAD, "typo: ")),
    (message(stop_sequences=[""]), (400, BAD, "stop_sequences[0]: ")),
    (message(messages=FIVE_BREAKPOINTS), (400, BAD, "cache_control: ")),
    (message(cache_control=TWO_HOURS), (400, BAD, "cache_control.ttl: ")),
    (message(tools=[{"name": "a"}]), (400, BAD, "tools[0]: ")),
    (message(tools=[{"type": "web_search_20250305", "name": "web_search"}]), (400, BAD, "tools[0].type: ")),
    (message(tool_choice={"type": "any"}), (400, BAD, "tool_choice: ")),
    (message(service_tier="priority"), (400, BAD, "service_tier: ")),
    (message(output_config={"effort": "low"}), (400, BAD, "output_config.effort: ")),
    (message(extra_body={"container": "c"}), (400, BAD, "container: ")),
    (Request("anthropic.models.retrieve", {"model_id": "claude-x"}), (404, UNKNOWN, "GET /v1/models/claude-x: ")),
    (Request("anthropic.models.list", {"limit": 0}), (400, BAD, "limit: ")),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_model(directory, TEMPLATE)
    with (
        serving_http("--model", str(directory)) as (url, address),
        Client(address, timeout_s=PATIENCE_S) as grpc,
        openai_client(url) as gpt,
        anthropic_client(url) as claude,
    ):
        yield Served(gpt, claude, grpc, grpc.tokenizer())


def matches(actual: Any, expected: Any) -> bool:
    """Return whether a value is the expected one, of the expected type, or matches the pattern."""
    if isinstance(expected, re.Pattern):
        return isinstance(actual, str) and expected.fullmatch(actual) is not None
    if isinstance(expected, type | UnionType):
        return isinstance(actual, expected)
    return bool(actual == expected)


ROWS = [
    pytest.param(request, path, expected, id=f"{api}: {behavior}")
    for api, rows in (
        ("chat", CHATS),
        ("completion", COMPLETIONS),
        ("response", RESPONSES),
        ("message", MESSAGES),
        ("diagnostics", DIAGNOSTICS),
        ("models", MODELS),
    )
    for behavior, request, path, expected in rows
]


@pytest.mark.parametrize(("documented_request", "path", "expected"), ROWS)
def test_a_response_is_as_documented(served: Served, documented_request: Request, path: str, expected: Any) -> None:
    actual = select(served.response_to(documented_request), path)
    if isinstance(expected, Request):
        expected = select(served.response_to(expected), path)
    assert matches(actual, expected), (actual, expected)


@pytest.mark.parametrize(("documented_request", "expected"), OPENAI_ERRORS)
def test_openais_client_gets_the_documented_error(served: Served, documented_request: Request, expected: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        documented_request.send(served)
    error = caught.value
    assert (error.status_code, error.type, error.param, error.code) == expected
    assert error.request_id


@pytest.mark.parametrize(("documented_request", "expected"), ANTHROPIC_ERRORS)
def test_anthropics_client_gets_the_documented_error(
    served: Served, documented_request: Request, expected: Any
) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        documented_request.send(served)
    status, kind, beginning = expected
    body: Any = caught.value.body
    assert (caught.value.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"]["message"].startswith(beginning)
    assert body["request_id"] == caught.value.request_id


# Of each API: the field for the maximum number of tokens, and the paths of the text in a response, of the text in an
# event, and of the number of cached tokens.
TEXT_PATHS = [
    (chat, "max_completion_tokens", CONTENT, "choices.0.delta.content", "usage.prompt_tokens_details.cached_tokens"),
    (completion, "max_tokens", "choices.0.text", "choices.0.text", "usage.prompt_tokens_details.cached_tokens"),
    (response, "max_output_tokens", "output.0.content.0.text", "delta", "usage.input_tokens_details.cached_tokens"),
    (message, "max_tokens", "content.0.text", "delta.text", "usage.cache_read_input_tokens"),
]


@pytest.mark.parametrize(("api", "max_tokens_field", "text_path", "delta_path", "cached_path"), TEXT_PATHS)
def test_cold_and_warm_answers_are_equal_to_the_one_over_grpc(
    served: Served, api: Any, max_tokens_field: str, text_path: str, delta_path: str, cached_path: str
) -> None:
    prompt = served.tokenizer.encode("Hello") if api is completion else served.tokenizer.encode_chat(HELLO)
    chunks = served.grpc.generate(prompt, max_new_tokens=20, salt=f"{api.__name__} grpc")
    expected = served.tokenizer.decode([token_id for chunk in chunks for token_id in chunk.token_ids])
    options = {"thinking": THINKING} if api is message else {}
    for is_streamed in (False, True):
        salted = {**options, max_tokens_field: 20, "extra_body": {"cache_salt": f"{api.__name__} {is_streamed}"}}
        for num_cached in (0, len(prompt) - 1):
            answer = as_json(api(stream=is_streamed, **salted).send(served))
            if is_streamed:
                assert "".join(delta_of(event, delta_path) for event in answer) == expected
            else:
                assert (select(answer, text_path), select(answer, cached_path)) == (expected, num_cached)


def delta_of(event: Any, path: str) -> str:
    """Return the text in an event; empty if there is none."""
    try:
        return select(event, path) or ""
    except (AttributeError, IndexError, TypeError):
        return ""


def chat_retains(served: Served, *parts: Any, **options: Any) -> bool:
    """Send a chat with these parts; return whether more blocks are retained after it."""
    before = served.grpc.stats().blocks.retained
    chat(messages=user_message(*parts), **options).send(served)
    return served.grpc.stats().blocks.retained > before


def long_part(name: str, **fields: Any) -> dict[str, Any]:
    """Return a text that fills several blocks and differs from that of other names."""
    return text_part(f"The part with the name {name} is long. " * 20, **fields)


def test_a_breakpoint_retains_the_prompt_up_to_there(served: Served) -> None:
    twelve_hours = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    assert chat_retains(served, long_part("retained", **twelve_hours), text_part("Go"), prompt_cache_options=EXPLICIT)
    assert chat_retains(
        served, long_part("longer", **twelve_hours), long_part("later"), prompt_cache_options={"ttl": "30m"}
    )


def test_in_explicit_mode_only_breakpoints_retain(served: Served) -> None:
    assert not chat_retains(served, long_part("explicit"), prompt_cache_options={"mode": "explicit", "ttl": "30m"})
    assert chat_retains(served, long_part("implicit"), prompt_cache_options={"mode": "implicit", "ttl": "30m"})


def test_diagnostics_name_the_part_that_changed(served: Served) -> None:
    first = message(diagnostics={"previous_message_id": None}, system="Be brief.").send(served)
    previous = {"previous_message_id": first.id}
    turn = [*HELLO, {"role": "assistant", "content": first.content[0].text}, *HELLO]
    assert message(diagnostics=previous, system="Be brief.", messages=turn).send(served).diagnostics is None
    reason = message(diagnostics=previous, system="Be long.", messages=turn).send(served).diagnostics.cache_miss_reason
    assert reason.type == "system_changed"
    assert 0 < reason.cache_missed_input_tokens < token_count(system="Be brief.").send(served).input_tokens


def test_a_schema_of_pydantic_is_parsed(served: Served) -> None:
    class Answer(pydantic.BaseModel):
        a: bool

    no_white_space: Any = {"10": -100, "32": -100}
    completion = served.openai.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Answer, logit_bias=no_white_space, max_completion_tokens=100
    )
    assert isinstance(completion.choices[0].message.parsed, Answer)


def test_a_stream_that_is_closed_early_ends_its_request(served: Served) -> None:
    cancelled = served.grpc.stats().requests.cancelled
    with served.openai.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, max_completion_tokens=2000
    ) as stream:
        next(iter(stream))
    wait_until(lambda: served.grpc.stats().requests.cancelled == cancelled + 1)
