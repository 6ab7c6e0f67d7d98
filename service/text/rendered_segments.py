"""The segments of a rendered conversation: which token belongs to the system prompt, to the tools, or to a message."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

TOOLS = "tools"


def segments_of(
    messages: Sequence[Mapping[str, Any]], text: str, without_tools: str, ends: Sequence[int]
) -> Callable[[int], str] | None:
    """Return a function that names the segment of a token.

    What a template writes before a message belongs to that message.

    Args:
        messages: the conversation.
        text: the rendered conversation.
        without_tools: the conversation rendered without its tools.
        ends: where the text of each token ends.

    Returns:
        The function; None without `ends`.
    """
    if not ends:
        return None
    bounds, cursor = array("I"), 0
    for message in messages:
        for part in _texts(message):
            start = text.find(part, cursor)
            cursor = cursor if start < 0 else start + len(part)
        bounds.append(bisect_right(ends, cursor))  # tokens that end in this message
    tools_start = tools_end = 0
    if without_tools != text:
        start = _common_prefix_length(text, without_tools)
        num_after = _common_prefix_length(text[start:][::-1], without_tools[start:][::-1])
        tools_start, tools_end = bisect_right(ends, start), bisect_right(ends, len(text) - num_after)
    names = [message_segment(index, str(message.get("role", ""))) for index, message in enumerate(messages)]

    def segment_of(position: int) -> str:
        if tools_start <= position < tools_end:
            return TOOLS
        index = bisect_right(bounds, position)
        return names[index] if index < len(names) else ""

    return segment_of


def message_segment(index: int, role: str) -> str:
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
    """Return the length of the common prefix."""
    return len(commonprefix((first, second)))  # noqa: RUF071  texts, not paths
