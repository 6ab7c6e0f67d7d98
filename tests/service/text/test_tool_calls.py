"""Tool calls in the text of a completion."""

from __future__ import annotations

import json

import pytest

from radixkv.service.text.tool_calls import ToolCall, ToolCallText, has_json_tool_calls, tool_call_grammar

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Größe"}}\n</tool_call>'
WEATHER = ToolCall("weather", {"city": "Größe"})

CASES = [
    ("", "", []),
    ("No call.", "No call.", []),
    (CALL, "", [WEATHER]),
    (f"Let me see.\n{CALL}", "Let me see.", [WEATHER]),
    (f"{CALL}\n{CALL}", "", [WEATHER, WEATHER]),
    ('<tool_call>{"name": "a"}</tool_call>', "", [ToolCall("a", {})]),
    ('<tool_call>{"name": "a", "parameters": {"b": 1}}</tool_call>', "", [ToolCall("a", {"b": 1})]),
    ('<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>', "", [ToolCall("a", {}), ToolCall("b", {})]),
    ("<tool_call>no JSON</tool_call> after", "<tool_call>no JSON</tool_call> after", []),
    ('<tool_call>[{"name": "a"}, 1]</tool_call>', '<tool_call>[{"name": "a"}, 1]</tool_call>', []),
    ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    ('<tool_call>{"name": "", "parameters": 1}</tool_call>',) * 2 + ([],),
    ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ('<tool_call>{"name": "a", "parameters": {"b": 1e999}}</tool_call>',) * 2 + ([],),
    ('<tool_call>{"name": "a", "parameters": {"b": NaN}}</tool_call>',) * 2 + ([],),
    ('<tool_call>{"name": "a", "parameters": {"b": "\\ud800"}}</tool_call>',) * 2 + ([],),
    ('before <tool_call>{"name": "a"', 'before <tool_call>{"name": "a"', []),
    ("a < b, <tool, <tool_cal", "a < b, <tool, <tool_cal", []),
    ("<tool_call>" * 3, "<tool_call>" * 3, []),
]  # fmt: skip


@pytest.mark.parametrize(("whole", "text", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_text_and_calls_are_separated(whole: str, text: str, calls: list[ToolCall], size: int) -> None:
    parser = ToolCallText()
    pieces, found = [], []
    for start in range(0, len(whole), size):
        piece, complete = parser.put(whole[start : start + size])
        pieces.append(piece)
        found += complete
    assert ("".join([*pieces, parser.end()]).rstrip("\n"), found) == (text, calls)


@pytest.mark.parametrize(
    ("template", "has_calls"),
    [
        ("<tool_call>\n{{ call | tojson }}\n</tool_call>", True),
        ("<tool_call>\n<function={{ name }}>", False),
        ("<tool_call>{{ name }}<arg_key>", False),
        ("{{ messages }}", False),
    ],
)
def test_templates_with_json_calls_are_known(template: str, has_calls: bool) -> None:
    assert has_json_tool_calls(template) is has_calls


@pytest.mark.parametrize("is_parallel", [False, True])
def test_the_grammar_accepts_calls_only(is_parallel: bool) -> None:
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"name": "weather", "parameters": schema}, {"name": "clock"}]
    grammar = tool_call_grammar(tools, is_parallel=is_parallel)
    tokenizer = llguidance.LLTokenizer("byte")

    def accepts(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not matcher.get_error()
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def call(name: str, **arguments: object) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    assert accepts(call("weather", city="Rome"))
    assert accepts(call("clock"))
    assert not accepts(call("other"))
    assert not accepts(call("weather", city=1))
    assert not accepts("Rome")
    assert accepts(f"{call('clock')}\n{call('clock')}") is is_parallel
