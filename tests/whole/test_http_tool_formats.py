"""Over HTTP: tool calls in Mistral's format, some of whose tags are special tokens, and reasoning in tags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.service.text.tool_templates import MISTRAL_ARGS
from tests.whole.http_server import anthropic_client, openai_client, serving_http, write_model

pytestmark = pytest.mark.usefixtures("forked_servers")

# The prompt ends with the beginning of reasoning if it is switched on.
TEMPLATE = f"{MISTRAL_ARGS}{{% if enable_thinking %}}<think>\n{{% endif %}}{{# until </think> #}}"
SCHEMA_WITH_UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
EMPTY_SCHEMA = {"type": "object", "additionalProperties": False}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "auto", "parameters": {**SCHEMA_WITH_UNIT, "additionalProperties": False}},
    },
    {"type": "function", "function": {"name": "none", "parameters": EMPTY_SCHEMA}},
]
NAMED_TOOL = {"type": "function", "function": {"name": "auto"}}
QUESTION: Any = [{"role": "user", "content": "How warm is it?"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, TEMPLATE, ["[TOOL_CALLS]", "[ARGS]"])
    with serving_http("--model", str(directory)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def gpt(url: str) -> Iterator[openai.OpenAI]:
    with openai_client(url) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(url) as client:
        yield client


def test_tool_calls_are_forced_and_parsed_in_each_api(gpt: Any, claude: Any) -> None:
    options = {"model": "", "messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    (whole,) = gpt.chat.completions.create(tool_choice=NAMED_TOOL, **options).choices
    (call,) = whole.message.tool_calls
    assert (whole.message.content, whole.finish_reason, call.function.name) == (None, "tool_calls", "auto")
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")

    chunks = [each.choices[0] for each in gpt.chat.completions.create(tool_choice=NAMED_TOOL, stream=True, **options)]
    (streamed_call,) = [each for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert streamed_call.function.model_dump() == call.function.model_dump()
    assert not any(chunk.delta.content for chunk in chunks)

    result = {"role": "tool", "tool_call_id": call.id, "content": "12"}  # the template requires an id of 9 characters
    turn = {**options, "messages": [*QUESTION, whole.message.model_dump(exclude_none=True), result], "max_tokens": 3}
    (second,) = gpt.chat.completions.create(tool_choice="none", **turn).choices
    assert second.message.tool_calls is None

    claude_tools = [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS
    ]
    choice = {"type": "tool", "name": "none"}
    message = claude.messages.create(
        model="", max_tokens=200, messages=QUESTION, tools=claude_tools, tool_choice=choice
    )
    (block,) = message.content
    assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "none")

    flat_tools = [{"type": "function", **each["function"]} for each in TOOLS]
    response = gpt.responses.create(
        model="",
        input="How warm?",
        tools=flat_tools,
        tool_choice={"type": "function", "name": "auto"},
        max_output_tokens=200,
    )
    (item,) = response.output
    assert (item.type, item.name) == ("function_call", "auto")
    allowed_tools = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "none"}]}
    response = gpt.responses.create(
        model="",
        input="?",
        tools=flat_tools,
        tool_choice=allowed_tools,
        max_output_tokens=200,
        parallel_tool_calls=False,
    )
    assert [each.name for each in response.output] == ["none"]
    assert response.tool_choice.model_dump() == allowed_tools


def test_reasoning_is_separated_in_each_api(gpt: Any, claude: Any) -> None:
    options = {"model": "", "messages": QUESTION, "temperature": 0, "max_tokens": 20, "reasoning_effort": "low"}
    answer = gpt.chat.completions.create(**options)
    message = answer.choices[0].message
    assert message.content == ""
    assert message.reasoning_content
    assert message.reasoning == message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens

    deltas = [each.choices[0].delta for each in gpt.chat.completions.create(stream=True, **options)]
    assert "".join(getattr(each, "reasoning", "") for each in deltas) == message.reasoning
    assert not any(each.content for each in deltas)
    (hidden,) = gpt.chat.completions.create(extra_body={"include_reasoning": False}, **options).choices
    assert not hasattr(hidden.message, "reasoning")

    thinking = {"type": "enabled", "budget_tokens": 1024}
    claude_options = {
        "model": "",
        "messages": QUESTION,
        "max_tokens": 20,
        "thinking": thinking,
        "extra_body": {"temperature": 0},
    }
    with claude.messages.stream(**claude_options) as stream:
        (block,) = stream.get_final_message().content
    assert (block.type, block.thinking) == ("thinking", message.reasoning)
    assert block.signature

    response_options = {
        "model": "",
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 20,
        "reasoning": {"effort": "low"},
    }
    (item,) = gpt.responses.create(**response_options).output
    assert (item.type, item.content[0].text) == ("reasoning", message.reasoning)
    events = list(gpt.responses.create(stream=True, **response_options))
    assert "".join(each.delta for each in events if each.type == "response.reasoning_text.delta") == message.reasoning


def test_without_an_option_for_reasoning_neither_api_reasons(gpt: Any, claude: Any) -> None:
    message = claude.messages.create(model="", max_tokens=5, messages=QUESTION, extra_body={"temperature": 0})
    assert [block.type for block in message.content] == ["text"]
    (choice,) = gpt.chat.completions.create(model="", messages=QUESTION, max_tokens=5, seed=1).choices
    assert choice.message.content
