"""Files of texts become requests: one per answer of a chat, one per prompt."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.planning.text_log import text_requests
from radixkv.planning.trace_records import Record

USER, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}


def requests_of(value: Any) -> list[tuple[Any, Any]]:
    return [(each.prompt, each.answer) for each in text_requests(Record("f:1", value))]


def test_each_answer_of_a_chat_is_a_request() -> None:
    shared = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}] * 2
    expected = [([USER], "I."), ([USER, ANSWER, USER], "I.")]
    assert requests_of({"id": "x", "conversations": shared}) == expected
    assert requests_of({"conversation_id": "x", "conversation": [USER, ANSWER] * 2}) == expected
    assert requests_of({"messages": [USER, ANSWER] * 2}) == expected


def test_a_chat_that_waits_for_an_answer_is_one_more_request() -> None:
    assert requests_of({"conversations": [{"from": "human", "value": "Who?"}]}) == [([USER], None)]
    assert requests_of({"conversation": [USER, ANSWER, USER]})[-1] == ([USER, ANSWER, USER], None)
    assert requests_of({"messages": [USER, ANSWER, USER]}) == [([USER, ANSWER, USER], None)]


def test_the_body_of_a_batch_is_one_request() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    (request,) = text_requests(Record("f:1", line | {"body": {"messages": [USER], "tools": tools}}))
    assert (request.prompt, request.tools) == ([USER], tools)
    assert requests_of(line | {"body": {"model": "m", "prompt": "Once"}}) == [("Once", None)]


@pytest.mark.parametrize("field", ["prompt", "text_input", "text", "input"])
def test_a_prompt_is_one_request(field: str) -> None:
    assert requests_of({field: "Once"}) == [("Once", None)]


def test_times_are_those_of_the_record() -> None:
    for time_fields, time_s in (({}, None), ({"tstamp": 1.5e9}, 1.5e9)):
        (request,) = text_requests(Record("f:1", {"prompt": "a", **time_fields}))
        assert request.time_s == time_s


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "f:1: expected a JSON object, got int 7"),
        ({"a": 1}, "f:1: expected text in one of the fields conversations, .*; got fields: a"),
        ({"prompt": ""}, "f:1: expected text in one of the fields"),
        ({"prompt": 7}, "f:1: expected text in one of the fields"),
        ({"messages": []}, "f:1: messages: expected at least one message, got none"),
        ({"messages": [7]}, r"f:1: messages\[0\]: expected a message, got int 7"),
        (
            {"conversation": [{"content": "x"}]},
            r"conversation\[0\]: expected a message with a role, got fields: content",
        ),
    ],
)
def test_a_record_without_text_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        requests_of(value)
