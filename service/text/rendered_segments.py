"""The segments of a conversation as text: which token belongs to the system prompt, to the tools, or to a message.

The text is that of the chat template, or a plain one, for a tokenizer whose chat template rejects the conversation. No
model was trained on the plain form.
"""

from __future__ import annotations

import itertools
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

_TOOLS = "tools"


class Part(NamedTuple):
    """A part of a conversation.

    Attributes:
        segment: name of the part.
        text: text of the part.
    """

    segment: str
    text: str


def plain_parts(body: Mapping[str, Any]) -> list[Part]:
    """Return the parts of the body of a request to the API of OpenAI or Anthropic, in the order of a prompt.

    Content that is neither text nor reasoning, such as an image or a tool call, is written as JSON.
    """
    parts = [Part("system", _format_message("system", body["system"]))] if body.get("system") else []
    if body.get("tools"):
        parts.append(Part(_TOOLS, _format_message(_TOOLS, body["tools"])))
    for index, message in enumerate(body["messages"]):
        fields = dict(message) if isinstance(message, Mapping) else {"content": message}
        role = str(fields.pop("role", ""))
        other_fields = {key: value for key, value in fields.items() if key != "content" and value is not None}
        text = _format_message(role, fields.get("content"))
        if other_fields:
            text += json.dumps(other_fields) + "\n"
        parts.append(Part(_message_segment(index, role), text))
    return parts


def segments_of(
    messages: Sequence[Mapping[str, Any]], text: str, without_tools: str, ends: Sequence[int]
) -> Callable[[int], str] | None:
    """Return a function that names the segment of a token.

    What a template writes before a message belongs to that message.

    Args:
        messages: the conversation.
        text: the rendered conversation.
        without_tools: the conversation rendered without its tools.
        ends: where the text of each token ends in `text`.

    Returns:
        The function; None without `ends`.
    """
    if not ends:
        return None
    message_ends, cursor = [], 0
    for message in messages:
        for part in _texts(message):
            start = text.find(part, cursor)
            cursor = cursor if start < 0 else start + len(part)
        message_ends.append(cursor)
    names = [_message_segment(index, str(message.get("role", ""))) for index, message in enumerate(messages)]
    segment_of = _segment_lookup(names, message_ends, ends)
    if without_tools == text:
        return segment_of

    # The tools are the text between the common prefix and the common suffix.
    prefix_chars = _common_prefix_length(text, without_tools)
    suffix_chars = _common_prefix_length(text[prefix_chars:][::-1], without_tools[prefix_chars:][::-1])
    tools_start, tools_end = bisect_right(ends, prefix_chars), bisect_right(ends, len(text) - suffix_chars)
    return lambda position: _TOOLS if tools_start <= position < tools_end else segment_of(position)


def segments_of_parts(parts: Sequence[Part], ends: Sequence[int]) -> Callable[[int], str] | None:
    """Return a function that names the segment of a token; None without `ends`.

    Args:
        parts: parts of the text.
        ends: where the text of each token ends.
    """
    if not ends:
        return None
    part_ends = itertools.accumulate(len(part.text) for part in parts)
    return _segment_lookup([part.segment for part in parts], part_ends, ends)


def _segment_lookup(names: Sequence[str], segment_ends: Iterable[int], ends: Sequence[int]) -> Callable[[int], str]:
    """Return a function that names the segment of a token; empty after the last segment.

    Args:
        names: the names of the segments.
        segment_ends: where the text of each segment ends.
        ends: where the text of each token ends.
    """
    token_ends = array("I", (bisect_right(ends, each) for each in segment_ends))  # the first token after each segment

    def segment_of(position: int) -> str:
        index = bisect_right(token_ends, position)
        return names[index] if index < len(names) else ""

    return segment_of


def _message_segment(index: int, role: str) -> str:
    """Return the name of a message's segment: the role for a system prompt, and else the index and the role."""
    return role if role in ("system", "developer") and not index else f"message {index} ({role})"


def _texts(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message as templates write them, without spaces at their ends."""
    content = message.get("content")
    if isinstance(content, str):
        return [content.strip()]
    parts = content if isinstance(content, list) else []
    return [str(part.get("text", "")).strip() for part in parts if isinstance(part, Mapping)]


def _common_prefix_length(first: str, second: str) -> int:
    return len(commonprefix((first, second)))  # noqa: RUF071  texts, not paths


def _format_message(role: str, content: Any) -> str:
    blocks = content if isinstance(content, list) else [content]
    texts = [_block_text(each) for each in blocks if each is not None]
    return "".join([f"<|{role}|>\n", *(f"{each}\n" for each in texts)])


def _block_text(block: Any) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return str(block["text"])
    if isinstance(block, Mapping) and isinstance(block.get("thinking"), str):
        return f"<think>\n{block['thinking']}\n</think>"
    if isinstance(block, Mapping):
        block = {key: value for key, value in block.items() if key != "cache_control"}
    return json.dumps(block)
