"""Tools over HTTP with the official clients: forced tool calls, their rendering in the next turn, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.whole.http_server import anthropic_client, openai_client, serving_http, write_model

pytestmark = pytest.mark.usefixtures("forked_servers")

# ChatML with tools and tool calls, as in the templates of Hermes and Qwen.
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}{% set call = call.function or call %}<tool_call>
{{ {'name': call.name, 'arguments': call.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
UNIT = {"enum": ["C", "F"]}
SCHEMA = {"type": "object", "properties": {"unit": UNIT}, "required": ["unit"], "additionalProperties": False}
FUNCTION = {"name": "weather", "description": "The weather now.", "parameters": SCHEMA}
TOOLS: Any = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "maxProperties": 0}}},
]
CLAUDE_TOOLS: Any = [
    {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS
]
QUESTION: Any = [{"role": "user", "content": "How warm is it?"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("model") / "with-tools"
    write_model(directory, TEMPLATE)
    with serving_http("--model", str(directory)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def gpt(url: str) -> Iterator[Any]:
    """A function that makes a chat completion with OpenAI's client."""
    with openai_client(url) as client:
        yield lambda **options: client.chat.completions.create(model="", max_completion_tokens=200, **options)


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(url) as client:
        yield client


def test_a_model_that_must_call_a_tool_does(gpt: Any) -> None:
    (choice,) = gpt(messages=QUESTION, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason, call.type) == (None, "tool_calls", "function")
    assert call.function.name in {"weather", "clock"}
    assert call.id.startswith("call_")


def test_a_model_that_must_call_one_tool_calls_that_one(gpt: Any) -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    (choice,) = gpt(messages=QUESTION, tools=TOOLS, tool_choice=forced).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["unit"] in {"C", "F"}


def test_a_streamed_tool_call_equals_the_one_that_is_not_streamed(gpt: Any) -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    options = {"messages": QUESTION, "tools": TOOLS, "tool_choice": forced, "temperature": 0}
    (whole,) = gpt(**options).choices
    choices = [chunk.choices[0] for chunk in gpt(stream=True, **options)]
    (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert call.index == 0
    assert call.function.model_dump() == whole.message.tool_calls[0].function.model_dump()
    assert choices[-1].finish_reason == "tool_calls"
    assert not any(choice.delta.content for choice in choices)


def test_the_next_turn_renders_the_call_as_it_was_generated(gpt: Any) -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    options = {"tools": TOOLS, "tool_choice": forced, "temperature": 0}
    first = gpt(messages=QUESTION, logprobs=True, **options)
    message = first.choices[0].message
    (call,) = message.tool_calls
    generated = bytes(byte for each in first.choices[0].logprobs.content for byte in each.bytes).decode()
    name, arguments = call.function.name, json.loads(call.function.arguments)
    assert generated == f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    result = {"role": "tool", "tool_call_id": call.id, "content": "12"}
    turn = [*QUESTION, message.model_dump(exclude_none=True), result]
    usage = gpt(messages=turn, **options).usage
    assert usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_unless_a_call_is_required_the_answer_may_be_text(gpt: Any) -> None:
    for choice in ("auto", "none"):
        (answer,) = gpt(messages=QUESTION, tools=TOOLS, tool_choice=choice, seed=1).choices
        assert answer.message.content
        assert answer.message.tool_calls is None


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_anthropics_client_gets_a_tool_call_and_the_next_turn_is_cached(
    claude: anthropic.Anthropic, is_streamed: bool
) -> None:
    options: dict[str, Any] = {
        "model": "with-tools",
        "max_tokens": 200,
        "messages": QUESTION,
        "tools": CLAUDE_TOOLS,
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    if is_streamed:
        with claude.messages.stream(**options) as stream:
            message = stream.get_final_message()
    else:
        message = claude.messages.create(**options)
    (block,) = message.content
    assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
    assert block.input["unit"] in {"C", "F"}
    tool_use = block.model_dump(include={"type", "id", "name", "input"})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "12"}]}
    turn: Any = [
        *QUESTION,
        {"role": "assistant", "content": [tool_use]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]},
    ]
    options = {"max_tokens": 1, "messages": turn, "tools": CLAUDE_TOOLS, "extra_body": {"cache_salt": str(is_streamed)}}
    cold, warm = (claude.messages.create(model="with-tools", **options).usage for _ in range(2))
    assert cold.cache_read_input_tokens == 0
    assert 0 < cold.input_tokens < 30 < cold.cache_creation_input_tokens
    assert warm.input_tokens == 1, "only the last token is not read from the cache"


@pytest.mark.parametrize("content", ["", []])
def test_the_result_of_a_tool_may_be_empty(claude: anthropic.Anthropic, content: Any) -> None:
    turn: Any = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "clock", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]},
    ]
    message = claude.messages.create(model="with-tools", max_tokens=1, messages=turn, tools=CLAUDE_TOOLS)
    assert message.usage.output_tokens == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.function\.name: expected a name"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice: expected none, auto, required or a function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice: expected a tool of this request, got another one",
        ),
        ({"tool_choice": "required"}, "tool_choice: expected tools to choose from, got none"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice, response_format: expected one of them, got both",
        ),
    ],
)
def test_bad_tools_get_a_clear_error(gpt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        gpt(messages=QUESTION, **options)
