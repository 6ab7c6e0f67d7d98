"""The messages of a conversation, in the forms that chat templates accept.

OpenAI's API, transformers and the templates of models represent four things differently. Each combination of their
representations is one form of the messages. The first form is the one that most templates accept:

| in a message | in a form |
|---|---|
| `content` is a list of parts | the list; or the texts of its parts, joined by line breaks |
| `content` is null | empty text; or null |
| `arguments` of a tool call, JSON text in OpenAI's API | an object; or JSON text |
| ids of tool calls, which templates of Mistral's models restrict | these ids; or 9 letters and digits for each |
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

# Keys of a message that may hold its reasoning. Most templates read the first key, those of gpt-oss the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_NUM_ID_CHARS = 9  # of ids of tool calls in templates of Mistral's models
# Writes calls, each with `name` and `arguments`, as text; None if it cannot.
WriteCalls = Callable[[Sequence[Mapping[str, Any]]], str | None]
# Functions that convert values of subclasses, such as members of an enum, to the JSON type.
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)


class Parts(list[dict[str, Any]]):
    """Parts of a content. Conversion to text raises: a prompt must not contain Python's notation of a list."""

    def __str__(self) -> NoReturn:
        raise TypeError("expected a template that iterates over the parts of a content, got one that writes them whole")

    __repr__ = __str__


class Conversation:
    """Checked messages with values of JSON types only.

    Args:
        messages: each with a `role`, such as `system`, `user` or `assistant`, its `content`, and other keys that
            templates read, such as `tool_calls`. Other values of None count as absent.

    Raises:
        TypeError: a message is not a mapping, or contains a value that has no JSON type.
        ValueError: there is no message, a content is neither text nor a list of texts, `tool_calls` is not a list of
            objects, the arguments of a tool call are not a JSON object, or a message has a `function_call`.
    """

    def __init__(self, messages: Sequence[object]) -> None:
        if not messages:
            raise ValueError("expected at least one message, got none")
        self._messages = [_validated_message(each, f"messages[{index}]") for index, each in enumerate(messages)]

    @property
    def roles(self) -> list[str]:
        """The roles of messages with content and without tool calls. Templates may omit content before a tool call."""
        return list(dict.fromkeys(each["role"] for each in self._messages if _has_checked_content(each)))

    @property
    def has_tool_calls(self) -> bool:
        """Whether a message has tool calls."""
        return any(each.get("tool_calls") for each in self._messages)

    def forms(self) -> Iterator[list[dict[str, Any]]]:
        """Iterate over the forms of these messages."""
        has_parts = any(isinstance(each.get("content"), Parts) for each in self._messages)
        has_nulls = any(each.get("content", "") is None for each in self._messages)
        has_calls = self.has_tool_calls
        has_choices = (has_parts, has_nulls, has_calls, has_calls)
        choices = [(False, True) if has_choice else (False,) for has_choice in has_choices]
        for joins_parts, keeps_nulls, dumps_arguments, has_short_ids in itertools.product(*choices):
            form = [_convert(each, joins_parts, keeps_nulls, dumps_arguments) for each in self._messages]
            yield [_with_short_ids(each) for each in form] if has_short_ids else form


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first one, which has the role `system`, contains the tools as JSON text."""
    text = json.dumps([each.get("function", each) for each in tools], ensure_ascii=False)
    has_system = bool(messages) and messages[0].get("role") == "system"
    system = messages[0] if has_system else {"role": "system", "content": ""}
    return [{**system, "tools": text}, *messages[1 if has_system else 0 :]]


def without_tools(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the tools in them."""
    return [{name: value for name, value in each.items() if name != "tools"} for each in messages]


def with_calls_as_text(messages: Sequence[dict[str, Any]], write: WriteCalls) -> list[dict[str, Any]]:
    """Return messages with their tool calls written into their contents, as far as `write` can write these calls."""
    converted = []
    for message in messages:
        calls = [each.get("function", each) for each in message.get("tool_calls") or ()]
        text = write(calls) if calls and all("arguments" in each for each in calls) else None
        if text is not None:
            other_fields = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**other_fields, "content": f"{message.get('content') or ''}{text}"}
        converted.append(message)
    return converted


def without_tool_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without their tool calls."""
    return [{name: value for name, value in each.items() if name != "tool_calls"} for each in messages]


def with_longer_content(messages: Sequence[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """Return messages in which each text in the contents of a role of `Conversation.roles` is one character longer."""
    return [_lengthen(each) if _has_checked_content(each) and each["role"] == role else each for each in messages]


def json_copy(value: object) -> Any:
    """Return a copy with JSON types only, because a template could call methods of other objects.

    Raises:
        TypeError: a value has no JSON type.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind, convert in _SCALARS:
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, Mapping):
        return {str(name): json_copy(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [json_copy(item) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):  # a Pydantic model, such as a message of OpenAI's client
        return json_copy(dump())
    raise TypeError(f"chat: expected text, numbers, lists and mappings, got {type(value).__name__}")


def _validated_message(message: object, place: str) -> dict[str, Any]:
    copy = json_copy(message)
    if not isinstance(copy, dict):
        raise TypeError(f"messages: expected mappings with a role and content, got {type(message).__name__}")
    # An answer that consists of tool calls may have no content at all.
    has_null_content = copy["content"] is None if "content" in copy else copy.get("role") == "assistant"
    copy = {name: value for name, value in copy.items() if value is not None}
    reasoning = next((copy[name] for name in _REASONING_KEYS if name in copy), None)
    if reasoning is not None:
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    if has_null_content:
        copy["content"] = None
    if not isinstance(copy.get("content", ""), str | list | None):  # a template would write it in Python's notation
        kind = type(copy["content"]).__name__
        raise ValueError(f"{place}.content: expected text, a list of parts of the type text, or null, got {kind}")
    if isinstance(copy.get("content"), list):
        copy["content"] = Parts(
            _validated_part(each, f"{place}.content[{index}]") for index, each in enumerate(copy["content"])
        )
        if copy.get("tool_calls"):  # a template may write text but drop parts, which is not checked here; see `roles`
            copy["content"] = _join_parts(copy["content"])
    if copy.get("function_call"):
        raise ValueError(f"{place}.function_call: expected tool_calls, which replaced it in OpenAI's API")
    if "tool_calls" in copy:
        copy["tool_calls"] = _validated_tool_calls(copy["tool_calls"], f"{place}.tool_calls")
    return copy


def _validated_part(part: object, place: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind != "text":
        raise ValueError(
            f"{place}: expected a part of the type text, since models are served for text only, got {kind}"
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{place}.text: expected text, got {type(part.get('text')).__name__}")
    return part


def _validated_tool_calls(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls):
        raise ValueError(f"{place}: expected a list of objects, got {type(calls).__name__}")
    return [_validated_tool_call(each, f"{place}[{index}]") for index, each in enumerate(calls)]


def _validated_tool_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a call whose arguments, which the call or its `function` has, are an object."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _validated_tool_call(call["function"], f"{place}.function")}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")  # some servers send nothing for a function without parameters
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):  # the error message must not contain the arguments
        raise ValueError(f"{place}.arguments: expected a JSON object, got other text")
    return {**call, "arguments": parsed}


def _convert(message: dict[str, Any], joins_parts: bool, keeps_nulls: bool, dumps_arguments: bool) -> dict[str, Any]:
    copy, content = dict(message), message.get("content", "")
    if content is None and not keeps_nulls:
        copy["content"] = ""
    if isinstance(content, Parts) and joins_parts:
        copy["content"] = _join_parts(content)
    if dumps_arguments and message.get("tool_calls"):
        copy["tool_calls"] = [_dump_arguments(each) for each in message["tool_calls"]]
    return copy


def _dump_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _dump_arguments(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} if "arguments" in call else call


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which a hash replaces each id of a tool call that is not 9 letters and digits."""
    copy = dict(message)
    if "tool_call_id" in copy:
        copy["tool_call_id"] = _short_id(copy["tool_call_id"])
    if copy.get("tool_calls"):
        copy["tool_calls"] = [{**each, "id": _short_id(each.get("id", ""))} for each in copy["tool_calls"]]
    return copy


def _short_id(value: object) -> str:
    text = str(value)
    is_short = len(text) == _NUM_ID_CHARS and text.isascii() and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode()).hexdigest()[:_NUM_ID_CHARS]


def _join_parts(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(str(each["text"]) for each in parts)


def _has_checked_content(message: Mapping[str, Any]) -> bool:
    """Return whether it is checked that a template writes the content of a message; see `Conversation.roles`."""
    return bool(message.get("content")) and isinstance(message.get("role"), str) and not message.get("tool_calls")


def _lengthen(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, Parts):
        return {**message, "content": Parts({**each, "text": each["text"] + "."} for each in content)}
    return {**message, "content": content + "."} if isinstance(content, str) else message
