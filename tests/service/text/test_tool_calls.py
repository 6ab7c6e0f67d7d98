"""Tool calls in the text of a completion."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

import pytest

from radixkv.config import sections
from radixkv.service.text.reasoning import REASONING_FORMATS
from radixkv.service.text.tool_calls import ToolCall, ToolCallText
from radixkv.service.text.tool_formats import TOOL_FORMATS
from tests.service.text.tool_texts import FORCED, FUNCTIONS, OTHERS

SCHEMAS = {each["name"]: each.get("parameters", {}) for each in FUNCTIONS}
CASES = [(name, text, calls) for name, cases in FORCED.items() for text, calls in cases]
CASES += [(name, text, parts) for name, cases in OTHERS.items() for text, parts in cases]


def split(name: str, text: str, next_size: Callable[[], int]) -> list[str | ToolCall]:
    """Return the parts of a text that arrives in pieces."""
    parser = ToolCallText(TOOL_FORMATS[name], SCHEMAS)
    parts: list[str | ToolCall] = []
    for piece in pieces_of(text, next_size):
        parts += parser.put(piece)
    return merged([*parts, *parser.end()])


def pieces_of(text: str, next_size: Callable[[], int]) -> Iterator[str]:
    while text:
        size = next_size()
        yield text[:size]
        text = text[size:]


def merged(parts: list[str | ToolCall]) -> list[str | ToolCall]:
    """Return the parts with neighboring texts joined."""
    joined: list[str | ToolCall] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_text_and_calls_are_separated(name: str, text: str, parts: list[str | ToolCall], size: int) -> None:
    assert split(name, text, lambda: size) == parts


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_no_text_is_lost_however_it_arrives(name: str) -> None:
    rng = random.Random(name)
    cases = "".join(text for text, _ in (*FORCED[name], *OTHERS.get(name, ())))
    words = list(dict.fromkeys(re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|.", cases[:3000], re.DOTALL)))
    for _ in range(150):
        text = "".join(rng.choices(words, k=rng.randrange(25)))
        if rng.random() < 0.5:
            position = rng.randrange(len(text) + 1)
            text = text[:position] + rng.choice(FORCED[name])[0] + text[position:]
        whole = split(name, text, lambda: 10_000)
        assert split(name, text, lambda: rng.choice((1, 1, 2, 3, 9))) == whole
        if not any(isinstance(part, ToolCall) for part in whole):
            assert "".join(map(str, whole)) == text


def test_every_format_has_a_name_in_the_configuration() -> None:
    assert sorted(TOOL_FORMATS) == list(sections.TOOL_FORMATS)
    assert sorted(REASONING_FORMATS) == list(sections.REASONING_FORMATS)
    assert FORCED.keys() == TOOL_FORMATS.keys()
