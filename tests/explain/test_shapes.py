"""The kinds of differences in the shapes that users report, with a token per character and with a real tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from radixkv.api.explanation import DifferenceKind, Explanation, LookUp
from radixkv.api.miss_reason import MissReason
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.explain import kinds
from radixkv.explain.explanation import explain
from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.text.tokenizer import Tokenizer
from tests.fakes import MODEL, FakeClock

from .shapes import ANSWER, NEXT, RULES, SHAPES, TASK


class Encoding(NamedTuple):
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


CHARACTERS = Encoding(lambda text: [ord(each) for each in text], lambda ids: "".join(map(chr, ids)))


@pytest.fixture(scope="module", params=["characters", "tiny"])
def encoding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    if request.param == "characters":
        return CHARACTERS
    directory = Path(tmp_path_factory.mktemp("tiny"))
    write_tiny_files(directory)
    tokenizer = Tokenizer.load(directory)
    return Encoding(tokenizer.encode, tokenizer.decode)


def explained(
    prompt: Sequence[int], cached: Sequence[int], decode: Callable[[Sequence[int]], str] | None
) -> Explanation:
    cache = PrefixCache(1024, 16, clock=FakeClock())
    with cache.lease(MODEL, np.array(cached, "<u4").tobytes()) as lease:
        lease.commit(len(cached))
    tokens = np.array(prompt, "<u4").tobytes()
    look_up = LookUp(tokens, 0, MissReason.DIVERGED, cache.divergence(MODEL, tokens), None)
    return explain(look_up, decode=decode)


class CountingPattern:
    """A regular expression that records how much text it is asked to search."""

    def __init__(self, pattern: re.Pattern[str], searched: list[int]) -> None:
        self._pattern = pattern
        self._searched = searched

    def finditer(self, text: str, start: int = 0, end: int = 10**9) -> Iterator[re.Match[str]]:
        self._searched.append(min(end, len(text)) - start)
        return self._pattern.finditer(text, start, end)


def test_only_the_text_around_a_difference_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regular expressions would hold the GIL for as long as they search."""
    searched: list[int] = []
    for name in ("_DATE_OR_TIME", "_UUID"):
        monkeypatch.setattr(kinds, name, CountingPattern(getattr(kinds, name), searched))
    for length in (16, 3_000):
        words, others = "one word or two " * (length // 16), "and another one " * (length // 16)
        explained(
            CHARACTERS.encode(f"{RULES}{words}{TASK}"), CHARACTERS.encode(f"{RULES}{others}{TASK}"), CHARACTERS.decode
        )
    prompt, cached = [*range(100, 140), 1, *range(200, 240)], [*range(100, 140), 2, *range(200, 240)]
    texts = {1: "10:31", 2: "10:47"}
    explained(prompt, cached, lambda ids: "".join(texts.get(each, " " * 400) for each in ids))
    assert 0 < max(searched) <= 3 * 128


def test_very_long_texts_are_judged_by_their_tokens() -> None:
    prompt, cached = [*range(100, 140), 1, *range(200, 240)], [*range(100, 140), 2, *range(200, 240)]

    def long_texts(ids: Sequence[int]) -> str:
        return "".join("10:31" if each == 1 else "10:47" if each == 2 else " " * 1000 for each in ids)

    def short_texts(ids: Sequence[int]) -> str:
        return long_texts(ids).replace(" " * 1000, " ")

    kinds_found = [explained(prompt, cached, each).difference for each in (short_texts, long_texts)]
    assert [each and each.kind for each in kinds_found] == [DifferenceKind.DATE_OR_TIME, DifferenceKind.REPLACED]


@pytest.mark.parametrize("name", SHAPES)
def test_the_kind_of_a_reported_shape(name: str, encoding: Encoding) -> None:
    prompt, cached, kind = SHAPES[name]
    found = explained(encoding.encode(prompt), encoding.encode(cached), encoding.decode)
    assert found.difference is not None
    assert found.difference.kind is kind


@pytest.mark.parametrize("name", SHAPES)
def test_what_would_have_matched_is_the_end_that_both_prompts_have(name: str) -> None:
    """All shapes but the unrelated ones end with the same characters."""
    prompt, cached, kind = SHAPES[name]
    difference = explained(*map(CHARACTERS.encode, (prompt, cached)), CHARACTERS.decode).difference
    assert difference is not None
    if kind is DifferenceKind.UNCLASSIFIED:
        assert difference.lost_tokens == 0
        assert difference.prompt_span_tokens is None
        return
    assert difference.prompt_span_tokens is not None
    start = explained(*map(CHARACTERS.encode, (prompt, cached)), None).left_at + difference.prompt_span_tokens
    equal = prompt[start : start + difference.lost_tokens]
    assert len(equal) == difference.lost_tokens >= 32
    assert equal in cached


@pytest.mark.parametrize("name", ["injected message", "stripped thinking", "tools in another order", "last tool first"])
def test_tokens_alone_show_what_moved_or_is_on_one_side(name: str, encoding: Encoding) -> None:
    prompt, cached, kind = SHAPES[name]
    difference = explained(encoding.encode(prompt), encoding.encode(cached), None).difference
    assert difference is not None
    assert difference.kind is kind
    assert (difference.before_text, difference.prompt.different_text, difference.branch.equal_text) == ("", "", "")


def test_without_text_a_random_id_is_a_replaced_span() -> None:
    prompt, cached, _ = SHAPES["uuid of a session"]
    difference = explained(CHARACTERS.encode(prompt), CHARACTERS.encode(cached), None).difference
    assert difference is not None
    assert difference.kind is DifferenceKind.REPLACED


def test_moved_tools_would_have_matched_to_the_end() -> None:
    prompt, cached, _ = SHAPES["tools in another order"]
    difference = explained(CHARACTERS.encode(prompt), CHARACTERS.encode(cached), CHARACTERS.decode).difference
    assert difference is not None
    assert difference.prompt_span_tokens == difference.branch_span_tokens
    assert difference.lost_tokens > len(TASK)


def test_the_same_text_in_other_tokens_is_retokenized() -> None:
    pieces = {1: "flu", 2: "sh", 3: "flush"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces.get(each) or chr(each) for each in ids)

    before, after = CHARACTERS.encode(RULES), CHARACTERS.encode(ANSWER + NEXT)
    difference = explained([*before, 3, *after], [*before, 1, 2, *after], decode).difference
    assert difference is not None
    assert difference.kind is DifferenceKind.RETOKENIZED
    assert (difference.prompt_span_tokens, difference.branch_span_tokens) == (1, 2)
    assert difference.prompt.different_text == difference.branch.different_text == "flush"
    assert difference.lost_tokens == len(after)


@pytest.mark.parametrize("first", [[1], []])
def test_another_first_token_is_its_own_kind(first: list[int]) -> None:
    text = CHARACTERS.encode(RULES + TASK)

    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(each) for each in ids if each > 2)  # special tokens have no text

    difference = explained([*first, *text], [2, *text], decode).difference
    assert difference is not None
    assert difference.kind is DifferenceKind.FIRST_TOKEN
    assert difference.lost_tokens == len(text)


def test_a_first_word_that_differs_is_no_special_token() -> None:
    difference = explained(CHARACTERS.encode("A" + RULES), CHARACTERS.encode("B" + RULES), CHARACTERS.decode).difference
    assert difference is not None
    assert difference.kind is DifferenceKind.REPLACED
