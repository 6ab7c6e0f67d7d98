"""Which segment of a conversation a token belongs to, and conversations in a plain form."""

from __future__ import annotations

import json

from radixkv.service.text.rendered_segments import plain_parts, segments_of, segments_of_parts

MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "Who?"}, {"type": "text", "text": "And why?"}]},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": "Who?"},
]
TOOLS = json.dumps([{"name": "read"}])
TEXT = "<s>system\nBe brief.\n{}</s><s>user\nWho?\nAnd why?</s><s>assistant\n</s><s>user\nWho?</s><s>assistant\n"
CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


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


def test_system_and_tools_come_before_the_messages() -> None:
    body = {"system": "Be brief.", "tools": [{"name": "read"}], "messages": [{"role": "user", "content": "Who?"}]}
    assert plain_parts(body) == [
        ("system", "<|system|>\nBe brief.\n"),
        ("tools", '<|tools|>\n{"name": "read"}\n'),
        ("message 0 (user)", "<|user|>\nWho?\n"),
    ]


def test_everything_of_a_message_is_written() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "user", "content": [IMAGE, {"type": "thinking", "thinking": "b"}, "c"]},
    ]
    assert [part.text for part in plain_parts({"messages": messages})] == [
        "<|system|>\na\n",
        f"<|assistant|>\n{json.dumps({'tool_calls': [CALL]})}\n",
        f"<|user|>\n{json.dumps(IMAGE)}\n<think>\nb\n</think>\nc\n",
    ]


def test_breakpoints_make_no_difference() -> None:
    bodies = [
        {"messages": [{"role": "user", "content": [{**IMAGE, **breakpoint_fields}]}]}
        for breakpoint_fields in ({}, {"cache_control": {"ttl": "1h"}})
    ]
    assert plain_parts(bodies[0]) == plain_parts(bodies[1])


def test_segments_are_the_parts() -> None:
    parts = plain_parts({"system": "ab", "messages": [{"role": "user", "content": "c"}]})
    num_characters = sum(len(part.text) for part in parts)
    segment_of = segments_of_parts(parts, range(1, num_characters + 1))
    assert segment_of is not None
    names = [segment_of(position) for position in range(num_characters + 1)]
    assert names == [part.segment for part in parts for _ in part.text] + [""]
    assert segments_of_parts(parts, []) is None
