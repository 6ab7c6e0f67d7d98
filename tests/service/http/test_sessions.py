from __future__ import annotations

import pytest

from radixkv.service.http.tools import EncodedChat, Tools
from radixkv.service.text.answer_format import AnswerFormat
from radixkv.service.text.reasoning import REASONING_FORMATS
from radixkv.service.text.tool_formats import TOOL_FORMATS
from radixkv.v1.hints_pb2 import Awaits
from radixkv.v1.prefill_pb2 import GenerateRequest

CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
THINKING = next(iter(REASONING_FORMATS.values()))


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
    answer_format = AnswerFormat(TOOL_FORMATS[tool_format], THINKING, {"<|tool_call>": 7})
    EncodedChat([1], answer_format, tools, is_open).constrain(generate)
    assert generate == GenerateRequest(**expected)


def test_an_answer_that_must_be_a_call_awaits_a_tool() -> None:
    generate = GenerateRequest()
    EncodedChat([1], AnswerFormat(TOOL_FORMATS["hermes"]), Tools((CLOCK,), "required"), None).constrain(generate)
    assert generate.prefill.awaits == Awaits.AWAITS_TOOL
