"""Parts of a completion: reasoning, text and calls."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from radixkv.service.text.answer_format import AnswerPart, AnswerParts, Reasoning
from radixkv.service.text.reasoning import REASONING_FORMATS
from radixkv.service.text.tool_calls import ToolCall
from radixkv.service.text.tool_formats import TOOL_FORMATS

CLOCK = '<tool_call>{"name": "clock"}</tool_call>'
CALL = ToolCall("clock", {})
R = Reasoning

# A completion, whether the prompt ends with the beginning of reasoning, and its parts.
CASES: list[tuple[str, bool, list[AnswerPart]]] = [
    ("<think>\nHm. So.\n</think>\n\nYes.", False, [R("Hm. So."), "Yes."]),
    ("Hm.\n</think>\n\nYes.", True, [R("Hm."), "Yes."]),
    ("\n<think>\nHm.</think>Yes.", True, [R("Hm."), "Yes."]),
    ("Yes. </think>", False, ["Yes. </think>"]),
    ("Yes, <think>no</think>", False, ["Yes, <think>no</think>"]),
    ("<think></think>Yes. <think>", False, ["Yes. <think>"]),
    ("<think>Never ends </thin", False, [R("Never ends </thin")]),
    ("Never ends <", True, [R("Never ends <")]),
    ("<thi", False, ["<thi"]),
    ("<thi", True, [R("<thi")]),
    ("", True, []),
    (" ", False, [" "]),
    (f"<think>{CLOCK}</think>\n{CLOCK}", False, [R(CLOCK), CALL]),
    (f"a b</think>\nNow. {CLOCK}\n", True, [R("a b"), "Now.", CALL]),
]


def read(text: str, next_size: Callable[[], int], parts: AnswerParts) -> list[AnswerPart]:
    """Return the parts of a completion that arrives in pieces; neighbors of the same kind are joined."""
    joined: list[AnswerPart] = []
    while True:
        size = next_size()
        for part in parts.put(text[:size], is_last=size >= len(text)):
            last = joined[-1] if joined else None
            if isinstance(part, str) and isinstance(last, str):
                joined[-1] = last + part
            elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
                joined[-1] = Reasoning(last.text + part.text)
            else:
                joined.append(part)
        if size >= len(text):
            return joined
        text = text[size:]


def parts_of(*, is_open: bool) -> AnswerParts:
    tools = TOOL_FORMATS["hermes"]
    return AnswerParts(REASONING_FORMATS["think"], is_open=is_open, tools=tools, functions=[{"name": "clock"}])


@pytest.mark.parametrize(("text", "is_open", "parts"), CASES)
def test_a_completion_is_separated_however_it_arrives(text: str, is_open: bool, parts: list[AnswerPart]) -> None:
    rng = random.Random(text)
    assert read(text, lambda: 1000, parts_of(is_open=is_open)) == parts
    for _ in range(20):
        assert read(text, lambda: rng.choice((1, 1, 2, 5)), parts_of(is_open=is_open)) == parts


@pytest.mark.parametrize(("is_parallel", "num_calls"), [(True, 2), (False, 1)])
def test_an_answer_has_as_many_calls_as_allowed(is_parallel: bool, num_calls: int) -> None:
    parts = AnswerParts(tools=TOOL_FORMATS["hermes"], is_parallel=is_parallel)
    assert parts.put(f"{CLOCK}\n{CLOCK}", is_last=True) == [CALL] * num_calls
    assert parts.num_calls == num_calls


def test_without_formats_all_is_text() -> None:
    assert AnswerParts().put(f"<think></think>{CLOCK}", is_last=True) == [f"<think></think>{CLOCK}"]
