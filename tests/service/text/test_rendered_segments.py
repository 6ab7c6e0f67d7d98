"""Which segment of a conversation a token belongs to."""

from __future__ import annotations

import json

from radixkv.service.text.rendered_segments import segments_of

MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "Who?"}, {"type": "text", "text": "And why?"}]},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": "Who?"},
]
TOOLS = json.dumps([{"name": "read"}])
TEXT = "<s>system\nBe brief.\n{}</s><s>user\nWho?\nAnd why?</s><s>assistant\n</s><s>user\nWho?</s><s>assistant\n"


def segment(position: int, tools: str = "") -> str:
    """Return the name of the segment of a character of `TEXT`; each character is a token."""
    text = TEXT.format(tools)
    segment_of = segments_of(MESSAGES, text, TEXT.format(""), range(1, len(text) + 1))
    assert segment_of is not None
    return segment_of(position)


def test_text_that_a_template_writes_before_a_message_belongs_to_the_message() -> None:
    assert segment(0) == segment(TEXT.index("brief")) == "system"
    assert segment(TEXT.index("</s>")) == segment(TEXT.index("why")) == "message 1 (user)"
    assert segment(TEXT.rindex("Who?")) == "message 3 (user)"
    assert segment(len(TEXT) - 4) == ""


def test_text_that_is_missing_without_tools_belongs_to_the_tools() -> None:
    start = TEXT.index("{}")
    assert {segment(position, TOOLS) for position in range(start, start + len(TOOLS))} == {"tools"}
    assert segment(start - 1, TOOLS) != "tools"
    assert segment(start + len(TOOLS), TOOLS) == "message 1 (user)"


def test_without_the_ends_of_tokens_there_are_no_segments() -> None:
    assert segments_of(MESSAGES, TEXT, TEXT, []) is None
