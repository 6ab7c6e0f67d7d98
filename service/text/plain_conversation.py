"""Conversations as plain text, for a tokenizer whose chat template rejects them. No model was trained on this form."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from radixkv.service.text.rendered_segments import TOOLS, message_segment


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
        parts.append(Part(TOOLS, _format_message(TOOLS, body["tools"])))
    for index, message in enumerate(body["messages"]):
        fields = dict(message) if isinstance(message, Mapping) else {"content": message}
        role = str(fields.pop("role", ""))
        other_fields = {key: value for key, value in fields.items() if key != "content" and value is not None}
        text = _format_message(role, fields.get("content"))
        if other_fields:
            text += json.dumps(other_fields) + "\n"
        parts.append(Part(message_segment(index, role), text))
    return parts


def segments_of_parts(parts: Sequence[Part], ends: Sequence[int]) -> Callable[[int], str] | None:
    """Return a function that names the segment of a token; None without `ends`.

    Args:
        parts: parts of the text.
        ends: where the text of each token ends.
    """
    if not ends:
        return None
    segment_ends, cursor = [], 0  # position of the first token after each part
    for part in parts:
        cursor += len(part.text)
        segment_ends.append(bisect_right(ends, cursor))
    names = [part.segment for part in parts]

    def segment_of(position: int) -> str:
        index = bisect_right(segment_ends, position)
        return names[index] if index < len(names) else ""

    return segment_of


def _format_message(role: str, content: Any) -> str:
    blocks = content if isinstance(content, list) else [content]
    texts = [_text(each) for each in blocks if each is not None]
    return "".join([f"<|{role}|>\n", *(f"{each}\n" for each in texts)])


def _text(block: Any) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return str(block["text"])
    if isinstance(block, Mapping) and isinstance(block.get("thinking"), str):
        return f"<think>\n{block['thinking']}\n</think>"
    if isinstance(block, Mapping):
        block = {key: value for key, value in block.items() if key != "cache_control"}
    return json.dumps(block)
