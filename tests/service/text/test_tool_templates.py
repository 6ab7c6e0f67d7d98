"""Formats are recognized by the template, and a template writes earlier calls in the format in which they are read."""

from __future__ import annotations

import json

import pytest

from radixkv.service.text.chat_template import ChatTemplate
from radixkv.service.text.reasoning import reasoning_format_of
from radixkv.service.text.tool_calls import ToolCall, ToolCallText
from radixkv.service.text.tool_formats import TOOL_FORMATS, tool_format_of
from tests.service.text.tool_templates import GEMMA, TEMPLATES
from tests.service.text.tool_texts import FUNCTIONS, WEATHER

SCHEMAS = {each["name"]: each.get("parameters", {}) for each in FUNCTIONS}
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
ID = "call_0123456789abcdef01234567"  # of a call


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_a_template_writes_calls_as_they_are_read(family: str) -> None:
    source, name = TEMPLATES[family]
    form = tool_format_of(source, {"<|tool_call|>"})
    assert form is TOOL_FORMATS[name]
    call = {"name": WEATHER.name, "arguments": json.dumps(WEATHER.arguments)}
    question = {"role": "user", "content": "How warm is it?"}
    calling = {"role": "assistant", "content": None, "tool_calls": [{"id": ID, "type": "function", "function": call}]}
    result = {"role": "tool", "tool_call_id": ID, "content": "12 degrees"}
    template = ChatTemplate(source, {"bos_token": "<s>"}, write_calls=form.write)
    before = template.render([question], tools=TOOLS, add_generation_prompt=False)
    assert '"weather"' in before
    after = template.render([question, calling], tools=TOOLS, add_generation_prompt=False)
    assert after.startswith(before)
    answer = after[len(before) :].removeprefix("<|start_header_id|>assistant<|end_header_id|>\n\n")
    parser = ToolCallText(form, SCHEMAS)
    parts = [*parser.put(answer.removeprefix("<|im_start|>assistant\n")), *parser.end()]
    assert [part for part in parts if isinstance(part, ToolCall)] == [WEATHER]
    whole = template.render([question, calling, result], tools=TOOLS)
    assert whole.startswith(after)
    assert "12 degrees" in whole


def test_calls_that_a_template_refuses_are_written_as_text() -> None:
    form = TOOL_FORMATS["llama3_json"]
    template = ChatTemplate(TEMPLATES["llama3"][0], {}, write_calls=form.write)
    call = {"type": "function", "id": ID, "function": {"name": "clock", "arguments": "{}"}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    text = template.render(messages, tools=TOOLS, add_generation_prompt=False)
    assert '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}<|eot_id|>' in text


@pytest.mark.parametrize(
    ("family", "reasoning"),
    [("qwen3", "think"), ("always_thinking", "think"), ("magistral", "mistral"), ("hermes", None), ("llama3", None)],
)
def test_reasoning_is_recognized_by_the_template(family: str, reasoning: str | None) -> None:
    recognized = reasoning_format_of(TEMPLATES[family][0])
    assert (None if recognized is None else recognized.name) == reasoning


def test_templates_without_calls_have_no_format() -> None:
    assert tool_format_of(GEMMA, {"<|tool_call|>"}) is None
    assert tool_format_of("<|tool_call|>{{ messages }}", ()) is None  # the tokenizer has no such token
