"""Grammars of calls: what they force, and what they leave to the model."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from radixkv.service.text.answer_format import AnswerFormat, AnswerParts
from radixkv.service.text.answer_grammar import calls_or_answer, forced_calls, strict_calls
from radixkv.service.text.reasoning import REASONING_FORMATS
from radixkv.service.text.tool_calls import ToolCall
from radixkv.service.text.tool_formats import TOOL_FORMATS
from tests.service.text.tool_texts import CLOCK, FORCED, FUNCTIONS, WEATHER

pytest.importorskip("llguidance")

from radixkv.service.structured.grammar_text import GrammarText
from radixkv.service.structured.matcher import GrammarConstraint
from radixkv.service.structured.vocabulary import Vocabulary

TAG = re.compile(r"<[^<>\n]+>|\[/?[A-Z_]+\]")
THINK = REASONING_FORMATS["think"]
TAG_KINDS = ("text", "special tokens")
CASES = [(name, text, calls) for name, cases in FORCED.items() for text, calls in cases]


def form_of(name: str, tag_kind: str) -> AnswerFormat:
    """Return a format whose tags are text, or special tokens with the ids from 256 on."""
    tools = TOOL_FORMATS[name]
    texts: tuple[str, ...] = ()
    if tag_kind == "special tokens":
        texts = (*tools.variants[:1], tools.prefix, tools.suffix, tools.quote, THINK.begin, THINK.end)
    tags = dict.fromkeys(tag for text in texts for tag in TAG.findall(text) if "{" not in tag)
    return AnswerFormat(tools, THINK, {tag: 256 + index for index, tag in enumerate(tags)})


@functools.cache
def constraint(grammar: str, tags: tuple[str, ...]) -> GrammarConstraint:
    """Compile a grammar for a vocabulary with a token per byte, a special token per tag, and an end."""
    names = [*(bytes([byte]) for byte in range(256)), *(tag.encode() for tag in tags), b"<end>"]
    vocabulary = Vocabulary.of_names(names, frozenset(range(256, len(names))))
    return GrammarConstraint(GrammarText("grammar", "grammar", grammar), vocabulary, clock=lambda: 0.0)


def accepts(grammar: str, text: str, form: AnswerFormat) -> bool:
    """Return whether a text is a whole answer that follows a grammar."""
    tags = tuple(form.tags)
    pieces = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += [form.tags[piece]] if piece in form.tags else piece.encode()

    end = 256 + len(tags)
    matcher = constraint(grammar, tags).start({end})
    for token_id in token_ids:
        if not matcher.allowed()[token_id]:
            return False
        matcher.accept(token_id)
    return bool(matcher.allowed()[end])


def forced_grammar(form: AnswerFormat, **options: Any) -> str:
    return forced_calls(form, FUNCTIONS, **{"is_parallel": True, **options})


@pytest.mark.parametrize("tag_kind", TAG_KINDS)
@pytest.mark.parametrize(("name", "text", "calls"), CASES)
def test_a_forced_answer_consists_of_calls(name: str, text: str, calls: list[ToolCall], tag_kind: str) -> None:
    form = form_of(name, tag_kind)
    grammar = forced_grammar(form)
    assert accepts(grammar, text, form)
    assert AnswerParts(tools=form.tool_format, functions=FUNCTIONS).put(text, is_last=True) == calls
    assert accepts(forced_grammar(form, is_parallel=False), text, form) is (len(calls) == 1)
    for other in ("", "Rome", f"So {text}", text.replace("weather", "wetter").replace("clock", "uhr")):
        assert not accepts(grammar, other, form)
    if "3" in text:
        assert not accepts(grammar, text.replace("3", "x"), form)


@pytest.mark.parametrize("tag_kind", TAG_KINDS)
@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_reasoning_may_come_before_a_forced_call(name: str, tag_kind: str) -> None:
    form, text = form_of(name, tag_kind), FORCED[name][0][0]
    assert accepts(forced_grammar(form, is_open=False), f"<think>Hm.</think>\n\n{text}", form)
    assert accepts(forced_grammar(form, is_open=False), text, form)
    assert accepts(forced_grammar(form, is_open=True), f"Hm.\n</think>\n\n{text}", form)
    assert not accepts(forced_grammar(form, is_open=True), text, form)
    assert not accepts(forced_grammar(form), f"<think>Hm.</think>\n\n{text}", form)


@pytest.mark.parametrize("tag_kind", TAG_KINDS)
@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_an_answer_that_begins_like_a_strict_call_follows_its_schema(name: str, tag_kind: str) -> None:
    form, text = form_of(name, tag_kind), FORCED[name][0][0]
    grammar = strict_calls(form, FUNCTIONS, is_parallel=True, is_open=False)
    answers = ["", "It is noon.", "<think>Hm.</think>\n\nIt is <b>noon</b>.", text, f"<think>Hm.</think>\n{text}"]
    assert all(accepts(grammar, answer, form) for answer in answers)
    assert accepts(strict_calls(form, FUNCTIONS, is_parallel=False, is_open=False), text, form)
    assert not accepts(grammar, text.replace("3", "x"), form)
    assert not accepts(grammar, text.replace("weather", "wetter").replace("clock", "uhr"), form)
    if name not in ("llama3_json", "pythonic"):  # in these, only the beginning of an answer is a call
        assert accepts(grammar, f"Let me see.\n{text}", form)
        assert not accepts(grammar, f"Let me see.\n{text.replace('3', 'x')}", form)


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_an_answer_that_must_be_json_may_be_calls_instead(name: str) -> None:
    form, text = form_of(name, "special tokens"), FORCED[name][0][0]
    answer = '%json {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": false}'
    grammar = calls_or_answer(form, FUNCTIONS, answer, is_parallel=True, is_open=False)
    for beginning in ("", "<think>Hm.</think>\n"):
        assert accepts(grammar, f"{beginning}{text}", form)
        assert accepts(grammar, beginning + '{"a":1}', form)
        assert not accepts(grammar, f"{beginning}So", form)
        assert not accepts(grammar, beginning + '{"a":2}', form)
    after_reasoning = calls_or_answer(AnswerFormat(None, THINK), [], answer, is_parallel=True, is_open=True)
    assert accepts(after_reasoning, 'Hm.</think>{"a":1}', AnswerFormat())
    assert not accepts(after_reasoning, '{"a":1}', AnswerFormat())


@pytest.mark.parametrize("tag_kind", TAG_KINDS)
@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_a_schema_without_properties_allows_any_arguments(name: str, tag_kind: str) -> None:
    form, text = form_of(name, tag_kind), FORCED[name][0][0]
    grammar = strict_calls(form, [{"name": "weather", "parameters": {"type": "object"}}], is_parallel=True)
    assert accepts(grammar, text, form)
    assert not accepts(grammar, text.replace("weather", "wetter"), form)


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_a_function_without_parameters_has_no_arguments(name: str) -> None:
    form = form_of(name, "text")
    grammar = forced_calls(form, [{"name": "weather"}, {"name": "clock"}], is_parallel=False)
    for text, calls in FORCED[name]:
        if calls in ([WEATHER], [CLOCK]):
            assert accepts(grammar, text, form) is (calls == [CLOCK])


def test_annotations_of_a_schema_are_left_out() -> None:
    schema = {"type": "object", "description": "x" * 9999, "properties": {"description": {"enum": ["title"]}}}
    form = AnswerFormat(TOOL_FORMATS["hermes"])
    grammar = forced_calls(form, [{"name": "a", "parameters": schema}], is_parallel=False)
    assert len(grammar) < 1000
    assert accepts(grammar, '<tool_call>\n{"name": "a", "arguments": {"description": "title"}}\n</tool_call>', form)


def test_arguments_with_other_quotes_than_in_json_follow_the_schema() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "string"}}}, "required": ["x"]}
    schema = {"type": "object", "properties": {"a": inner, "b": {}, "c": {"type": "boolean"}}, "required": ["a"]}
    form = AnswerFormat(TOOL_FORMATS["gemma4"])
    grammar = forced_calls(form, [{"name": "f", "parameters": schema}], is_parallel=False)
    for text, is_accepted in (
        ('{a:{x:[<|"|>y<|"|>,<|"|>z<|"|>]}}', True),
        ('{a:{x:[]},b:{k:[1,<|"|>v<|"|>,null]},c:true}', True),
        ("{a:{x:[]},c:false}", True),
        ("{a:{x:[1]}}", False),
        ("{b:1}", False),
        ("{a:{}}", False),
    ):
        assert accepts(grammar, f"<|tool_call>call:f{text}<tool_call|>", form) is is_accepted


def test_arguments_may_refer_to_shared_definitions() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": [1]}}}
    for name, text in (("pythonic", "[f(a={})]"), ("qwen3_coder", "<parameter=a>\n{}\n</parameter>\n")):
        form = AnswerFormat(TOOL_FORMATS[name])
        grammar = forced_calls(form, [{"name": "f", "parameters": schema}], is_parallel=False)
        call = text if name == "pythonic" else f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"
        assert accepts(grammar, call.format(1), form)
        assert not accepts(grammar, call.format(2), form)


def test_a_property_without_valid_values_is_left_out() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": False}}
    for name, call, other in (
        ("pythonic", "[f(a=1)]", "[f(b=1)]"),
        ("gemma4", "<|tool_call>call:f{a:1}<tool_call|>", "<|tool_call>call:f{b:1}<tool_call|>"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=b>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
    ):
        form = AnswerFormat(TOOL_FORMATS[name])
        grammar = forced_calls(form, [{"name": "f", "parameters": schema}], is_parallel=False)
        assert accepts(grammar, call, form)
        assert not accepts(grammar, other, form)
