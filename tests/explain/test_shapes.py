"""The kind of each shape of `shapes.py` is recognized, with a token per character and with a real tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from radixkv.api.explanation import DifferenceKind, Explanation, LookUp
from radixkv.api.miss_reason import MissReason
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.explain import kinds
from radixkv.explain.explanation import explain
from radixkv.explain.realignment import MIN_EQUAL_TOKENS
from tests.fakes import MODEL, FakeClock

from .shapes import ANSWER, CHARACTERS, ENCODINGS, NEXT, RULES, SHAPES, TASK, Encoding, encoding_named


@pytest.fixture(scope="module", params=ENCODINGS)
def encoding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    return encoding_named(request.param, tmp_path_factory.mktemp("tiny"))


def explained(
    prompt: Sequence[int], cached: Sequence[int], decode: Callable[[Sequence[int]], str] | None
) -> Explanation:
    """Explain a prompt with a cache that contains one other prompt; `decode` is None without text."""
    cache = PrefixCache(1024, 16, clock=FakeClock())
    with cache.lease(MODEL, np.array(cached, "<u4").tobytes()) as lease:
        lease.commit(len(cached))
    tokens = np.array(prompt, "<u4").tobytes()
    look_up = LookUp(tokens, 0, MissReason.DIVERGED, cache.divergence(MODEL, tokens), None)
    return explain(look_up, decode=decode)


class CountingPattern:
    """A regular expression that appends to `searched_chars` how many characters it is asked to search."""

    def __init__(self, pattern: re.Pattern[str], searched_chars: list[int]) -> None:
        self._pattern = pattern
        self._searched_chars = searched_chars

    def finditer(self, text: str, start: int = 0, end: int = 10**9) -> Iterator[re.Match[str]]:
        self._searched_chars.append(min(end, len(text)) - start)
        return self._pattern.finditer(text, start, end)


def test_only_the_text_around_a_difference_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regular expressions would hold the GIL for as long as they search."""
    searched_chars: list[int] = []
    for name in ("_DATE_OR_TIME", "_UUID"):
        monkeypatch.setattr(kinds, name, CountingPattern(getattr(kinds, name), searched_chars))
    for length in (16, 3_000):
        words, other_words = "one word or two " * (length // 16), "and another one " * (length // 16)
        prompt = CHARACTERS.encode(f"{RULES}{words}{TASK}")
        cached = CHARACTERS.encode(f"{RULES}{other_words}{TASK}")
        explained(prompt, cached, CHARACTERS.decode)

    # Tokens of 400 spaces surround the one that differs.
    prompt, cached = [*range(100, 140), 1, *range(200, 240)], [*range(100, 140), 2, *range(200, 240)]
    texts = {1: "10:31", 2: "10:47"}
    explained(prompt, cached, lambda ids: "".join(texts.get(token_id, " " * 400) for token_id in ids))
    assert 0 < max(searched_chars) <= 3 * kinds._MAX_MATCH_CHARS


def test_the_text_of_very_long_tokens_is_not_searched() -> None:
    prompt, cached = [*range(100, 140), 1, *range(200, 240)], [*range(100, 140), 2, *range(200, 240)]

    texts = {1: "10:31", 2: "10:47"}
    for num_chars, kind in ((1, DifferenceKind.DATE_OR_TIME), (1000, DifferenceKind.REPLACED)):
        other_text = " " * num_chars

        def decode(ids: Sequence[int], other_text: str = other_text) -> str:
            return "".join(texts.get(token_id, other_text) for token_id in ids)

        difference = explained(prompt, cached, decode).difference
        assert difference is not None
        assert difference.kind is kind


@pytest.mark.parametrize("name", SHAPES)
def test_the_kind_of_each_shape_is_recognized(name: str, encoding: Encoding) -> None:
    prompt, cached, kind = SHAPES[name]
    difference = explained(encoding.encode(prompt), encoding.encode(cached), encoding.decode).difference
    assert difference is not None
    assert difference.kind is kind


@pytest.mark.parametrize("name", SHAPES)
def test_the_lost_tokens_are_also_in_the_cached_prompt(name: str) -> None:
    """The prompts of all shapes but those without a kind end with the same characters as the cached prompts."""
    prompt, cached, kind = SHAPES[name]
    explanation = explained(CHARACTERS.encode(prompt), CHARACTERS.encode(cached), CHARACTERS.decode)
    difference = explanation.difference
    assert difference is not None
    if kind is DifferenceKind.UNCLASSIFIED:
        assert difference.lost_tokens == 0
        assert difference.prompt_span_tokens is None
        return
    assert difference.prompt_span_tokens is not None
    start = explanation.left_at + difference.prompt_span_tokens
    lost_text = prompt[start : start + difference.lost_tokens]
    assert len(lost_text) == difference.lost_tokens >= MIN_EQUAL_TOKENS
    assert lost_text in cached


@pytest.mark.parametrize("name", ["injected message", "stripped thinking", "tools in another order", "last tool first"])
def test_without_text_moved_inserted_and_removed_parts_are_recognized(name: str, encoding: Encoding) -> None:
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


def test_all_tokens_after_moved_tools_are_lost() -> None:
    prompt, cached, _ = SHAPES["tools in another order"]
    difference = explained(CHARACTERS.encode(prompt), CHARACTERS.encode(cached), CHARACTERS.decode).difference
    assert difference is not None
    assert difference.prompt_span_tokens == difference.branch_span_tokens
    assert difference.lost_tokens > len(TASK)


def test_the_same_text_in_other_tokens_is_retokenized() -> None:
    pieces = {1: "flu", 2: "sh", 3: "flush"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces.get(token_id) or chr(token_id) for token_id in ids)

    before, after = CHARACTERS.encode(RULES), CHARACTERS.encode(ANSWER + NEXT)
    difference = explained([*before, 3, *after], [*before, 1, 2, *after], decode).difference
    assert difference is not None
    assert difference.kind is DifferenceKind.RETOKENIZED
    assert (difference.prompt_span_tokens, difference.branch_span_tokens) == (1, 2)
    assert difference.prompt.different_text == difference.branch.different_text == "flush"
    assert difference.lost_tokens == len(after)


@pytest.mark.parametrize("first", [[1], []], ids=["another", "none"])
def test_another_or_no_special_token_at_the_start_is_a_kind_of_its_own(first: list[int]) -> None:
    text = CHARACTERS.encode(RULES + TASK)

    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in ids if token_id > 2)  # the special tokens 1 and 2 have no text

    difference = explained([*first, *text], [2, *text], decode).difference
    assert difference is not None
    assert difference.kind is DifferenceKind.FIRST_TOKEN
    assert difference.lost_tokens == len(text)


def test_a_first_word_that_differs_is_no_special_token() -> None:
    difference = explained(CHARACTERS.encode("A" + RULES), CHARACTERS.encode("B" + RULES), CHARACTERS.decode).difference
    assert difference is not None
    assert difference.kind is DifferenceKind.REPLACED
