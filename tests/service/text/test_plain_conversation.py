"""Conversations in a plain form, for tokenizers whose chat template rejects them."""

from __future__ import annotations

import json

from radixkv.service.text.plain_conversation import plain_parts, segments_of_parts

CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


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
