"""Text and calls of one completion."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.service.http.tools import CompletionSplitter, Tools
from radixkv.service.text.tool_calls import ToolCall

DEFINITIONS: Any = ({"type": "function", "function": {"name": "a"}},)
TWO_CALLS = '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "a"}</tool_call>\n'
A = ToolCall("a", {})


def split(tools: Tools, whole: str, size: int) -> tuple[str, list[ToolCall], CompletionSplitter]:
    splitter, texts, calls = CompletionSplitter(tools), [], []
    starts = range(0, len(whole), size)
    for start in starts:
        text, found = splitter.put(whole[start : start + size], is_last=start == starts[-1])
        texts.append(text)
        calls += found
    return "".join(texts), calls, splitter


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("is_parallel", "calls"), [(True, [A, A]), (False, [A])])
def test_an_answer_has_as_many_calls_as_allowed(size: int, is_parallel: bool, calls: list[ToolCall]) -> None:
    text, found, splitter = split(Tools(DEFINITIONS, "auto", is_parallel), TWO_CALLS, size)
    assert (text, found, splitter.has_calls) == ("", calls, True)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("tools", [Tools(), Tools(DEFINITIONS, "none")])
def test_without_tools_all_is_text(tools: Tools, size: int) -> None:
    text, found, splitter = split(tools, TWO_CALLS, size)
    assert (text, found, splitter.has_calls) == (TWO_CALLS, [], False)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_text_before_a_call_is_kept(size: int) -> None:
    text, found, _ = split(Tools(DEFINITIONS, "auto"), f"Let me see. {TWO_CALLS}", size)
    assert (text.rstrip(), found) == ("Let me see.", [A, A])
