"""OpenAI's Responses API with OpenAI's client: the same answers as chat completions, items and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.whole.http_server import openai_client, serving_http, write_model
from tests.whole.test_http_tools import TEMPLATE, TOOLS

pytestmark = pytest.mark.usefixtures("forked_servers")

FUNCTIONS: Any = [{"type": "function", "strict": False, **each["function"]} for each in TOOLS]
CHAT: Any = [{"role": "user", "content": "How warm is it?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, TEMPLATE)
    with serving_http("--model", str(directory)) as (url, _), openai_client(url) as client:
        yield client


def chat_text(client: openai.OpenAI, messages: Any, num_tokens: int) -> str:
    """Return the text of a chat completion."""
    options: Any = {"model": "", "max_completion_tokens": num_tokens, "temperature": 0}
    return client.chat.completions.create(messages=messages, **options).choices[0].message.content or ""


@pytest.mark.parametrize(
    ("input_options", "messages"),
    [
        ({"input": "How warm is it?"}, CHAT),
        ({"input": CHAT, "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, *CHAT]),
        (
            {"input": [{"role": "developer", "content": "Be brief."}, {"type": "message", **CHAT[0]}]},
            [{"role": "system", "content": "Be brief."}, *CHAT],
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "How warm is it?"}]}]}, CHAT),
    ],
    ids=["text", "instructions", "developer", "parts"],
)
def test_a_response_is_the_completion_of_the_chat(client: openai.OpenAI, input_options: Any, messages: Any) -> None:
    response = client.responses.create(model="", max_output_tokens=12, temperature=0, **input_options)
    assert response.output_text == chat_text(client, messages, 12)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + 12


def test_the_next_turn_reuses_the_first(client: openai.OpenAI) -> None:
    first = client.responses.create(model="", input=CHAT, max_output_tokens=20, temperature=0)
    answer = [each.model_dump(exclude_none=True) for each in first.output]
    turn: Any = [*CHAT, *answer, {"role": "user", "content": "So?"}]
    second = client.responses.create(model="", input=turn, max_output_tokens=1)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_events_of_a_stream_have_the_documented_order(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="", input=CHAT, max_output_tokens=12, temperature=0)
    events = list(client.responses.create(model="", input=CHAT, max_output_tokens=12, temperature=0, stream=True))
    kinds = [each.type.removeprefix("response.") for each in events]
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert events[-1].response.output_text == whole.output_text
    # The helper of the client, which accumulates the events, raises if their order is wrong.
    with client.responses.stream(model="", input=CHAT, max_output_tokens=12, temperature=0) as stream:
        for _ in stream:
            pass


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_call_is_an_item_and_the_next_turn_reuses_it(client: openai.OpenAI, is_streamed: bool) -> None:
    options: Any = {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "weather"}, "temperature": 0}
    if is_streamed:
        events = list(client.responses.create(model="", input=CHAT, stream=True, **options))
        response = events[-1].response
        assert [each.type.removeprefix("response.") for each in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
    else:
        response = client.responses.create(model="", input=CHAT, **options)
    (call,) = response.output
    assert (response.status, call.type, call.name) == ("completed", "function_call", "weather")
    assert json.loads(call.arguments)["unit"] in {"C", "F"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    turn: Any = [*CHAT, call.model_dump(exclude_none=True), result]
    second = client.responses.create(model="", input=turn, tools=FUNCTIONS, max_output_tokens=1)
    assert second.usage.input_tokens_details.cached_tokens >= response.usage.input_tokens


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    response = client.responses.create(model="", input=CHAT, text=form)
    assert json.loads(response.output_text)["a"] in {1, 2}


def test_a_prompt_is_cached_before_it_is_needed(client: openai.OpenAI) -> None:
    prompt = "Warm this up before it is needed. " * 8
    body: Any = {"prompt_cache_options": {"prewarm": True, "ttl": "12h"}}
    warmed = client.responses.create(model="", input=prompt, extra_body=body)
    assert (warmed.output, warmed.usage.output_tokens) == ([], 0)
    usage = client.responses.create(model="", input=prompt, max_output_tokens=1).usage
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": []}, "input: expected text or a list of items"),
        ({"input": "a", "store": True}, "store: expected false, got true; this server stores no responses"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id: expected no value"),
        ({"input": [{"type": "web_search_call"}]}, r"input\[0\]\.type: expected message, function_call"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, r"tools\[0\]\.type: expected function"),
        ({"input": "a", "max_output_tokens": 10**9}, "input, max_output_tokens: expected at most"),
        ({"input": "a", "extra_body": {"typo": 1}}, "typo: this server does not know the field"),
    ],
)
def test_a_bad_request_gets_a_clear_error(client: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(model="", **options)
