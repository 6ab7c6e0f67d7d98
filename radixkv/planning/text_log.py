"""Prompts and answers in files of texts: ShareGPT, LMSYS, OpenAI's batch and fine-tuning files, and plain prompts.

| record | what it holds |
|---|---|
| `{"conversations": [{"from": "human", "value": TEXT}, ...]}` | ShareGPT: a chat; see below |
| `{"conversation": [{"role": "user", "content": TEXT}, ...]}` | LMSYS: a chat |
| `{"messages": [...]}` | a chat if it ends with an answer of the model, otherwise a single request |
| `{"body": {...}}`, also `payload` or `request` | OpenAI's batch file: the inner object is one of the other records |
| `{"prompt": TEXT}`, also `text_input`, `text` or `input` | a single request |

In a chat, each answer that is not the first message is one request, whose prompt is the messages before it. Messages
after the last answer form one more request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.config.model_directory import shown
from radixkv.errors import ConfigError
from radixkv.planning.trace_records import Record

Message = Mapping[str, Any]

_CHAT_FIELDS = ("conversations", "conversation", "messages")
_BODY_FIELDS = ("body", "payload", "request")
_PROMPT_FIELDS = ("prompt", "text_input", "text", "input")
_ROLE_OF_SPEAKER = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
_ANSWER_ROLES = frozenset({"assistant", "model"})
_TIME_FIELDS = ("tstamp", "created", "created_at")  # LMSYS' arena has the first one, OpenAI the others
_MAX_TIME_S = 2**40  # milliseconds since 1970 are larger, so they are not mistaken for seconds


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request with its text.

    Attributes:
        where: place of the request in the file, for error messages.
        time_s: seconds since 1970; None if the file does not contain it.
        prompt: a text, or the messages of a chat.
        answer: text of the answer; None if there is none.
        tools: functions that the model may call, in the form of OpenAI's API.
    """

    where: str
    time_s: float | None
    prompt: str | Sequence[Message]
    answer: str | None = None
    tools: Sequence[Message] | None = None


def text_requests(record: Record) -> Iterator[TextRequest]:
    """Yield the requests of a record, as the docstring of this module describes.

    Raises:
        ConfigError: the record has no text. The message names the line, the expected and the actual fields.
    """
    where, fields = record
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {shown(fields)}")
    body = next((fields[each] for each in _BODY_FIELDS if isinstance(fields.get(each), dict)), fields)
    time_s = next((fields[each] for each in _TIME_FIELDS if _is_time(fields.get(each))), None)
    chat_field = next((each for each in _CHAT_FIELDS if isinstance(body.get(each), list)), None)
    if chat_field is not None:
        tools = body.get("tools")
        tools = tools if isinstance(tools, list) else None
        yield from _chat_requests(where, time_s, chat_field, body[chat_field], tools)
        return
    prompt = next((body[each] for each in _PROMPT_FIELDS if isinstance(body.get(each), str) and body[each]), None)
    if prompt is None:
        expected = ", ".join((*_CHAT_FIELDS, *_BODY_FIELDS, *_PROMPT_FIELDS))
        got = ", ".join(map(str, list(body)[:8])) or "none"
        raise ConfigError(f"{where}: expected text in one of the fields {expected}; got fields: {got}")
    yield TextRequest(where, time_s, prompt)


def _chat_requests(
    where: str, time_s: float | None, field: str, values: Sequence[Any], tools: Sequence[Message] | None
) -> Iterator[TextRequest]:
    messages = [_parse_message(each, f"{where}: {field}[{index}]") for index, each in enumerate(values)]
    if not messages:
        raise ConfigError(f"{where}: {field}: expected at least one message, got none")
    is_answer = [each["role"] in _ANSWER_ROLES for each in messages]
    # The field `messages`, if it does not end with an answer, is the prompt of a single request.
    if field != "messages" or is_answer[-1]:
        for index, message in enumerate(messages):
            if is_answer[index] and index:
                content = message.get("content")
                yield TextRequest(where, time_s, messages[:index], content if isinstance(content, str) else "", tools)
    if not is_answer[-1]:
        yield TextRequest(where, time_s, messages, None, tools)


def _parse_message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a message, got {shown(value)}")
    role = value.get("role", value.get("from"))
    if not isinstance(role, str):
        raise ConfigError(
            f"{where}: expected a message with a role, got fields: {', '.join(map(str, list(value)[:8]))}"
        )
    role = _ROLE_OF_SPEAKER.get(role, role)
    if "role" in value:
        return {**value, "role": role}
    return {"role": role, "content": value.get("value", "")}


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MAX_TIME_S
