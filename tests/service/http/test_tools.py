"""How the tools and the reasoning options of a request constrain the answer, and divide it into parts."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.http.tools import EncodedChat, Tools, reasoning_variables
from radixkv.service.text.answer_format import AnswerFormat, Reasoning
from radixkv.service.text.reasoning import REASONING_FORMATS
from radixkv.service.text.tool_calls import ToolCall
from radixkv.service.text.tool_formats import TOOL_FORMATS
from radixkv.v1.hints_pb2 import Awaits
from radixkv.v1.prefill_pb2 import GenerateRequest

THINK = REASONING_FORMATS["think"]
FORM = AnswerFormat(TOOL_FORMATS["hermes"], THINK, {"<think>": 7})
DEFINITIONS: Any = tuple({"type": "function", "function": {"name": name}} for name in ("auto", "none", "required"))
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>'


class Template:
    """Stands in for a tokenizer whose chat template has the given variables."""

    def __init__(self, *variables: str) -> None:
        self.has_template_variable = variables.__contains__
        self.encode_rendered = list


def chat(text: str, tools: Tools) -> EncodedChat:
    """Encode a rendered conversation."""
    tokenizer: Any = Template()
    return EncodedChat.encode(text, tokenizer, FORM, tools)


@pytest.mark.parametrize(("text", "is_open"), [("a<think>\n", True), ("a", False), ("a<think>\n\n</think>\n\n", None)])
def test_the_end_of_the_prompt_says_whether_reasoning_may_follow(text: str, is_open: bool | None) -> None:
    assert chat(text, Tools()).is_open is is_open


def test_tools_may_have_the_names_of_choices() -> None:
    generate = GenerateRequest()
    tools = Tools(DEFINITIONS, "required", forced="none")
    tools.require_possible(generate)
    answer = chat("", tools).constrain(generate)
    assert '"none"' in generate.grammar
    assert '"auto"' not in generate.grammar
    assert answer.answer_parts().put(CALL, is_last=True) == [ToolCall("none", {})]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_only_allowed_tools_are_called(choice: str) -> None:
    generate = GenerateRequest()
    chat("", Tools(DEFINITIONS, choice, allowed=["none"])).constrain(generate)
    assert '"none"' in generate.grammar
    assert '"auto"' not in generate.grammar
    with pytest.raises(InvalidRequest, match="tool_choice: expected a tool of this request, got another one"):
        Tools(DEFINITIONS, choice, allowed=["other"]).require_possible(generate)


def test_only_forced_and_strict_calls_are_constrained() -> None:
    strict: Any = ({"type": "function", "function": {"name": "a", "strict": True}},)
    for tools, is_constrained in (
        (Tools(), False),
        (Tools(DEFINITIONS, "none"), False),
        (Tools(DEFINITIONS, "auto"), False),
        (Tools(DEFINITIONS, "required"), True),
        (Tools(DEFINITIONS, "auto", allowed=["auto", "none"]), True),
        (Tools(strict, "auto"), True),
        (Tools(strict, "none"), False),
    ):
        generate = GenerateRequest()
        chat("", tools).constrain(generate)
        assert bool(generate.grammar) is is_constrained


def test_an_answer_that_the_request_constrains_is_text() -> None:
    answer = chat("", Tools(DEFINITIONS, "auto")).constrain(GenerateRequest(regex=".*"))
    assert not answer.has_parts
    assert answer.answer_parts().put(f"<think>{CALL}", is_last=True) == [f"<think>{CALL}"]


@pytest.mark.parametrize("options", [{"json_object": True}, {"json_schema": '{"type": "object"}'}])
def test_an_answer_in_json_may_be_calls_or_come_after_reasoning(options: Any) -> None:
    for text, tools, is_grammar in (
        ("", Tools(), False),
        ("<think>", Tools(), True),
        ("", Tools(DEFINITIONS, "none"), False),
        ("", Tools(DEFINITIONS, "auto"), True),
    ):
        generate = GenerateRequest(**options)
        answer = chat(text, tools).constrain(generate)
        assert bool(generate.grammar) is is_grammar
        assert answer.has_parts is is_grammar


def test_special_tokens_are_shown_where_the_answer_may_have_parts() -> None:
    assert chat("", Tools()).shown_tags == {7: "<think>"}
    assert chat("", Tools()).answer_parts().put("<think>a</think>b", is_last=True) == [Reasoning("a"), "b"]


def test_schemas_that_are_too_long_for_a_grammar_are_refused() -> None:
    long_definitions: Any = ({"type": "function", "function": {"name": "a", "parameters": {"enum": ["x" * 20_000]}}},)
    with pytest.raises(
        InvalidRequest, match="tools, response_format: expected schemas whose grammar has at most 16384 characters"
    ):
        chat("", Tools(long_definitions, "required")).constrain(GenerateRequest())


def test_tools_are_refused_where_calls_have_no_known_format() -> None:
    Tools(DEFINITIONS, "none").require_format(AnswerFormat())
    with pytest.raises(InvalidRequest, match="tools: expected a model whose chat template writes calls"):
        Tools(DEFINITIONS, "auto").require_format(AnswerFormat())


@pytest.mark.parametrize(
    ("variables", "reasoning", "effort", "expected"),
    [
        (("reasoning_effort",), None, "high", {"reasoning_effort": "high"}),
        (("enable_thinking",), THINK, "low", {"enable_thinking": True}),
        (("thinking",), THINK, "none", {"thinking": False}),
        ((), None, "none", {}),
        ((), THINK, "medium", {}),
        ((), None, "low", "reasoning_effort: expected none, since this model never reasons, got low"),
        ((), THINK, "none", "reasoning_effort: expected medium, since this model always reasons, got none"),
        (
            (),
            None,
            "much",
            "reasoning_effort: expected one of none, minimal, low, medium, high, xhigh, got another name",
        ),
    ],
)
def test_reasoning_effort_depends_on_the_template(
    variables: tuple[str, ...], reasoning: Any, effort: str, expected: Any
) -> None:
    tokenizer: Any = Template(*variables)
    form = AnswerFormat(None, reasoning)
    if isinstance(expected, dict):
        assert reasoning_variables(tokenizer, form, effort) == expected
        return
    with pytest.raises(InvalidRequest, match=expected):
        reasoning_variables(tokenizer, form, effort)


@pytest.mark.parametrize(
    ("tool_format", "tools", "is_open", "expected"),
    [
        ("hermes", Tools((CLOCK,), "auto"), None, {"tool_call_begin": "<tool_call>"}),
        ("mistral", Tools((CLOCK,), "auto"), False, {"tool_call_begin": "[TOOL_CALLS]"}),
        ("gemma4", Tools((CLOCK,), "auto"), None, {"tool_call_begin": "<|tool_call>"}),  # its special token
        ("hermes", Tools((CLOCK,), "none"), None, {}),
        ("hermes", Tools(), None, {}),
        ("hermes", Tools(), False, {"write_generated": False}),  # reasoning that the next prompt will not contain
        ("hermes", Tools(), True, {"write_generated": False}),
    ],
)
def test_a_chat_sets_what_the_cache_records_of_its_answer(
    tool_format: str, tools: Tools, is_open: bool | None, expected: dict[str, object]
) -> None:
    generate = GenerateRequest()
    answer_format = AnswerFormat(TOOL_FORMATS[tool_format], THINK, {"<|tool_call>": 7})
    EncodedChat([1], answer_format, tools, is_open).constrain(generate)
    assert generate == GenerateRequest(**expected)


def test_an_answer_that_must_be_a_call_awaits_a_tool() -> None:
    generate = GenerateRequest()
    EncodedChat([1], AnswerFormat(TOOL_FORMATS["hermes"]), Tools((CLOCK,), "required"), None).constrain(generate)
    assert generate.prefill.awaits == Awaits.AWAITS_TOOL
