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
        ends: where the text of each token ends in `text`.

    Returns:
        The function; None without `ends`.
    """
    if not ends:
        return None
    segment_ends, cursor = array("I"), 0  # position of the first token after each message
    for message in messages:
        for part in _texts(message):
            start = text.find(part, cursor)
            cursor = cursor if start < 0 else start + len(part)
        segment_ends.append(bisect_right(ends, cursor))

    tools_start = tools_end = 0  # positions of tokens
    if without_tools != text:  # the tools are the text between the common prefix and the common suffix
        prefix_chars = _common_prefix_length(text, without_tools)
        suffix_chars = _common_prefix_length(text[prefix_chars:][::-1], without_tools[prefix_chars:][::-1])
        tools_start, tools_end = bisect_right(ends, prefix_chars), bisect_right(ends, len(text) - suffix_chars)
    names = [message_segment(index, str(message.get("role", ""))) for index, message in enumerate(messages)]

    def segment_of(position: int) -> str:
        if tools_start <= position < tools_end:
            return TOOLS
        index = bisect_right(segment_ends, position)
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
    return len(commonprefix((first, second)))  # noqa: RUF071  texts, not paths
