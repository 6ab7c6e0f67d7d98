"""Answers with tool calls in each format, as models write them."""

from __future__ import annotations

from typing import Any

from radixkv.service.text.tool_calls import ToolCall

FUNCTIONS: Any = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {"name": "clock"},
]
WEATHER = ToolCall("weather", {"city": "Rom é", "days": 3})
CLOCK = ToolCall("clock", {})
_JSON = '{"name": "weather", "arguments": {"city": "Rom é", "days": 3}}'
_CLOCK = '{"name": "clock", "arguments": {}}'
_ARGUMENTS = '{"city": "Rom é", "days": 3}'


def deepseek(text: str) -> str:
    """Return a text whose tags have the bars of DeepSeek's tags (U+FF5C) instead of ASCII bars."""
    return text.replace("<|", "<\uff5c").replace("|>", "\uff5c>")


# The beginning and the end of the calls in an answer of DeepSeek.
_DEEPSEEK = deepseek("<|tool▁calls▁begin|>"), deepseek("<|tool▁calls▁end|>")
# The formats of the calls in an answer: name (and index), then arguments.
_V3 = deepseek("<|tool▁call▁begin|>function<|tool▁sep|>{}\n```json\n{}\n```<|tool▁call▁end|>")
_V31 = deepseek("<|tool▁call▁begin|>{}<|tool▁sep|>{}<|tool▁call▁end|>")
_KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
_CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nRom é\n</parameter>\n<parameter=days>\n3\n</parameter>\n"

# By format: answers that consist of these calls, exactly as a server would force them.
FORCED: dict[str, tuple[tuple[str, list[ToolCall]], ...]] = {
    "hermes": (
        (f"<tool_call>\n{_JSON}\n</tool_call>", [WEATHER]),
        (f"<tool_call>\n{_CLOCK}\n</tool_call>\n<tool_call>\n{_JSON}\n</tool_call>", [CLOCK, WEATHER]),
    ),
    "llama3_json": (
        (_JSON.replace("arguments", "parameters"), [WEATHER]),
        (f"{_JSON}; {_CLOCK}".replace("arguments", "parameters"), [WEATHER, CLOCK]),
    ),
    "mistral": ((f"[TOOL_CALLS][{_JSON}]", [WEATHER]), (f"[TOOL_CALLS][{_JSON}, {_CLOCK}]", [WEATHER, CLOCK])),
    "mistral_args": (
        (f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}", [WEATHER]),
        (f"[TOOL_CALLS]clock[ARGS]{{}}[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}", [CLOCK, WEATHER]),
    ),
    "qwen3_coder": (
        (f"{_CODER}</function>\n</tool_call>", [WEATHER]),
        (
            f"{_CODER}</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
            [WEATHER, CLOCK],
        ),
    ),
    "glm4": (
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom é</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            [WEATHER],
        ),
        ("<tool_call>clock\n</tool_call>\n<tool_call>clock\n</tool_call>", [CLOCK, CLOCK]),
    ),
    "phi4_mini": ((f"<|tool_call|>[{_JSON}]<|/tool_call|>", [WEATHER]),),
    "functools": (
        (f"functools[{_JSON}]", [WEATHER]),
        (f"functools[{_JSON}, {_CLOCK}]", [WEATHER, CLOCK]),
    ),
    "deepseek_v3": (
        (_DEEPSEEK[0] + _V3.format("weather", _ARGUMENTS) + _DEEPSEEK[1], [WEATHER]),
        (
            _DEEPSEEK[0] + _V3.format("clock", "{}") + "\n" + _V3.format("weather", _ARGUMENTS) + _DEEPSEEK[1],
            [CLOCK, WEATHER],
        ),
    ),
    "deepseek_v31": (
        (_DEEPSEEK[0] + _V31.format("weather", _ARGUMENTS) + _DEEPSEEK[1], [WEATHER]),
        (
            _DEEPSEEK[0] + _V31.format("clock", "{}") + _V31.format("weather", _ARGUMENTS) + _DEEPSEEK[1],
            [CLOCK, WEATHER],
        ),
    ),
    "kimi_k2": (
        (_KIMI_SECTION.format(_KIMI.format("weather", 0, _ARGUMENTS)), [WEATHER]),
        (
            _KIMI_SECTION.format(_KIMI.format("weather", 0, _ARGUMENTS) + _KIMI.format("clock", 1, "{}")),
            [WEATHER, CLOCK],
        ),
    ),
    "gemma4": (
        ('<|tool_call>call:weather{city:<|"|>Rom é<|"|>,days:3}<tool_call|>', [WEATHER]),
        (
            '<|tool_call>call:clock{}<tool_call|><|tool_call>call:weather{city:<|"|>Rom é<|"|>,days:3}<tool_call|>',
            [CLOCK, WEATHER],
        ),
    ),
    "functiongemma": (
        (
            "<start_function_call>call:weather{city:<escape>Rom é<escape>,days:3}<end_function_call>",
            [WEATHER],
        ),
    ),
    "seed_oss": (
        (
            "<seed:tool_call>\n<function=weather>\n<parameter=city>Rom é</parameter>\n<parameter=days>3</parameter>\n"
            "</function>\n</seed:tool_call>",
            [WEATHER],
        ),
    ),
    "nemotron": ((f"<TOOLCALL>[{_JSON}]</TOOLCALL>", [WEATHER]),),
    "lfm2": (('<|tool_call_start|>[weather(city="Rom é", days=3)]<|tool_call_end|>', [WEATHER]),),
    "pythonic": (
        ('[weather(city="Rom é", days=3)]', [WEATHER]),
        ('[clock(), weather(city="Rom é", days=3)]', [CLOCK, WEATHER]),
    ),
}

# Calls whose arguments are no JSON that can be passed on: numbers beyond floats, lone surrogates, deep nesting.
_UNREADABLE_CALLS = [
    f'<tool_call>{{"name": "a", "parameters": {{"b": {value}}}}}</tool_call>'
    for value in ("1e999", "NaN", '"\\ud800"', "[" * 1000)
]

# By format: other answers, and the texts and calls of which they consist.
OTHERS: dict[str, tuple[tuple[str, list[str | ToolCall]], ...]] = {
    "hermes": (
        ("Let me see.\n<tool_call>" + _CLOCK + "</tool_call>\n\nDone. ", ["Let me see.", CLOCK, "Done. "]),
        ('<tool_call>[{"name": "clock"}, {"name": "a", "parameters": {}}]</tool_call>', [CLOCK, ToolCall("a", {})]),
        (
            '<tool_call>{"name": "a", "arguments": {"b": "</tool_call>\n"}}</tool_call>',
            [ToolCall("a", {"b": "</tool_call>\n"})],
        ),
        ('<tool_call>{"name": "clock", "arguments": {}}', [CLOCK]),  # the end tag was the end of the completion
        ("<tool_call>no JSON</tool_call> after", ["<tool_call>no JSON</tool_call> after"]),
        ('<tool_call>[{"name": "a"}, 1]</tool_call>', ['<tool_call>[{"name": "a"}, 1]</tool_call>']),
        ('<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
        ('<tool_call>{"name": ""}</tool_call>', ['<tool_call>{"name": ""}</tool_call>']),
        ("<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
        ('before <tool_call>{"name": "a"', ['before <tool_call>{"name": "a"']),
        ("a < b, <tool, <tool_cal", ["a < b, <tool, <tool_cal"]),
        ("<tool_call>" * 3, ["<tool_call>" * 3]),
        (f"<tool_call> <tool_call>{_CLOCK}</tool_call>", ["<tool_call>", CLOCK]),
        *((call, [call]) for call in _UNREADABLE_CALLS),
    ),
    "llama3_json": (
        ('<|python_tag|>{"name": "other", "parameters": {}}', [ToolCall("other", {})]),
        ('{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),  # not a tool of the request
        ('{"name": "clock"}', ['{"name": "clock"}']),
        ('{"name": "clock", "parameters": {}}; or not', [CLOCK, "; or not"]),
        ('It is {"name": "clock", "parameters": {}}', ['It is {"name": "clock", "parameters": {}}']),
        ("<|python", ["<|python"]),
    ),
    "mistral": (
        ("Wait. [TOOL_CALLS]clock[ARGS]{}", ["Wait.", CLOCK]),
        (f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{_ARGUMENTS}", [WEATHER]),
        (f"[TOOL_CALLS] weather{_ARGUMENTS}", [WEATHER]),
        ('[TOOL_CALLS] [{"name": "clock", "arguments": {}, "id": "123456789"}]', [CLOCK]),
        ("[TOOL_CALLS] are not {calls}", ["[TOOL_CALLS] are not {calls}"]),
        ("[TOOL_CALLS]" + "a" * 600 + "{}", ["[TOOL_CALLS]" + "a" * 600 + "{}"]),
    ),
    "qwen3_coder": (
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\n  a\n</tool_call>\n\n</parameter>\n"
            "<parameter=flag>\nTrue\n</parameter>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
            [ToolCall("weather", {"city": "  a\n</tool_call>\n", "flag": True, "days": "many"})],
        ),
        ("<tool_call> or <function=a>", ["<tool_call> or <function=a>"]),
        (
            "<tool_call>\n<function=a>\nb\n</function>\n</tool_call>",
            ["<tool_call>\n<function=a>\nb\n</function>\n</tool_call>"],
        ),
    ),
    "glm4": (
        ("<tool_call>clock</tool_call>", [CLOCK]),
        ("<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
        ("<tool_call>two words</tool_call>", ["<tool_call>two words</tool_call>"]),
    ),
    "gemma4": (
        (
            'Well. <|tool_call>call:a{b:{c-d: [1,<|"|>,x: "<tool_call|><|"|>]}}<tool_call|>',
            ["Well.", ToolCall("a", {"b": {"c-d": [1, ',x: "<tool_call|>']}})],
        ),
        ("<|tool_call>call:a{b}<tool_call|>", ["<|tool_call>call:a{b}<tool_call|>"]),
        ("<|tool_call>call:a{b:1", ["<|tool_call>call:a{b:1"]),
    ),
    "phi4_mini": ((f"<|tool_call|>[{_CLOCK}] So", [CLOCK, "So"]), (f"<|tool_call|>[{_CLOCK}]", [CLOCK])),
    "deepseek_v3": ((f"{_DEEPSEEK[0]} nothing", [f"{_DEEPSEEK[0]} nothing"]),),
    "pythonic": (
        (
            r"""[weather(city='it\'s \d', days=[1, {'a': None, "b": True}, -2.5])]""",
            [ToolCall("weather", {"city": "it's \\d", "days": [1, {"a": None, "b": True}, -2.5]})],
        ),
        ("[weather(city='a', days=1.5e3)]", [ToolCall("weather", {"city": "a", "days": 1500.0})]),
        ("[other()]", ["[other()]"]),
        ("[1, 2] is a list", ["[1, 2] is a list"]),
        ("[clock(a)]", ["[clock(a)]"]),
        ("[clock](weather)", ["[clock](weather)"]),
    ),
}
