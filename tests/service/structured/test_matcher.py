"""Token masks, compared with all possible strings; ends of answers; dead ends; masks that take too long."""

from __future__ import annotations

import itertools
import random
import re
from functools import cache

import numpy as np
import pytest

pytest.importorskip("llguidance")

from radixkv.errors import InvalidRequest
from radixkv.service.structured.grammar_text import GrammarText
from radixkv.service.structured.matcher import MAX_MASK_S, GrammarConstraint, GrammarMatcher
from radixkv.service.structured.vocabulary import Vocabulary

LETTERS = [b"a", b"b", b"c", "é".encode()[:1], "é".encode()[1:], "è".encode()[1:]]
NAMES = [*LETTERS, b"ab", b"bc", b"abc", b"aa", "é".encode(), "aé".encode(), b"a\xc3", b"bc", b"", b"<s>", b"</s>"]
SPECIAL = frozenset({15, 16})
AA = NAMES.index(b"aa")
VOCABULARY = Vocabulary.of_names(NAMES, SPECIAL)
LONGEST = 6  # maximum number of letters of the strings that are examined
LONGEST_NAME = 3  # maximum number of letters of a token

PATTERNS = [
    "abc",
    "a*",
    "(ab|bc)+",
    "a(b|c)?a",
    "[^a]b?",
    "(abc|ab|a)c*",
    "(aa){1,2}b?",
    "é+a?",
    "(é|è)b",
    "a.c",
    "b?c?",
    "(a|b|c){2}",
]


def constraint(text: str, kind: str = "regex", vocabulary: Vocabulary = VOCABULARY) -> GrammarConstraint:
    return GrammarConstraint(GrammarText(kind, kind, text), vocabulary)


@cache
def texts() -> dict[bytes, str]:
    """Return all strings of at most `LONGEST` letters that are valid UTF-8, by their bytes."""
    strings = {}
    for count in range(LONGEST + 1):
        for letters in itertools.product(LETTERS, repeat=count):
            try:
                strings[b"".join(letters)] = b"".join(letters).decode()
            except UnicodeDecodeError:
                continue
    return strings


def language(pattern: str) -> set[bytes]:
    """Return the strings that the whole pattern matches."""
    return {spelled for spelled, text in texts().items() if re.fullmatch(pattern, text)}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_allowed_tokens_are_those_that_continue_some_string(pattern: str) -> None:
    strings = language(pattern)
    prefixes = {spelled[:end] for spelled in strings for end in range(len(spelled) + 1)}
    compiled = constraint(pattern)
    draws = random.Random(pattern)
    for _ in range(20):
        matcher, spelled = compiled.start(frozenset({16})), b""
        while len(spelled) < LONGEST - LONGEST_NAME:  # `prefixes` then has every continuation by one token
            expected = {
                token_id
                for token_id, name in enumerate(NAMES)
                if name and token_id not in SPECIAL and spelled + name in prefixes
            }
            assert matcher.is_finished == (spelled in strings and not expected)
            if not expected:
                break
            allowed = set(np.flatnonzero(matcher.allowed()).tolist())
            assert allowed == expected | ({16} if spelled in strings else set())
            token_id = draws.choice(sorted(expected))
            matcher.accept(token_id)
            spelled += NAMES[token_id]


def test_only_stop_tokens_without_text_end_an_answer() -> None:
    compiled = constraint("b*")

    def allowed(*stop_token_ids: int) -> set[int]:
        return set(np.flatnonzero(compiled.start(frozenset(stop_token_ids)).allowed()).tolist())

    b, c = NAMES.index(b"b"), NAMES.index(b"c")
    assert allowed() == {b}
    assert allowed(16) == {b, 16}
    assert allowed(15, 16, c) == {b, 15, 16}


def test_a_matcher_follows_the_texts_of_its_grammar() -> None:
    compiled = constraint("ab|bc")
    first, second = compiled.start(frozenset()), compiled.start(frozenset())
    first.accept(0)
    second.accept(1)
    assert np.flatnonzero(first.allowed()).tolist() == [1]
    assert np.flatnonzero(second.allowed()).tolist() == [2]
    assert np.flatnonzero(compiled.start(frozenset()).allowed()).tolist() == [0, 1, 6, 7, 13]


def test_the_allowed_tokens_are_computed_once_per_token() -> None:
    num_clock_reads = itertools.count()

    def clock() -> float:
        next(num_clock_reads)
        return 0.0

    compiled = GrammarConstraint(GrammarText("regex", "regex", "a*"), VOCABULARY, clock=clock)
    matcher, before = compiled.start(frozenset()), next(num_clock_reads)
    assert not matcher.is_finished
    for _ in range(3):
        assert matcher.allowed() is matcher.allowed()
    assert next(num_clock_reads) == before + 3, "the clock is read twice for one computation"


def test_a_grammar_that_takes_too_long_is_refused_by_name() -> None:
    now_s = itertools.count(step=2 * MAX_MASK_S)
    with pytest.raises(InvalidRequest, match=r"^regex: expected one whose token mask takes at most 1 s, got 2.0 s$"):
        GrammarConstraint(GrammarText("regex", "regex", "a*"), VOCABULARY, clock=lambda: next(now_s))


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "", "it allows no token at all"),
        ("grammar", "start: x", 'unknown name: "x"'),
        ("grammar", "start: @x", "unknown grammar @x"),
        ("grammar", 'start: start "a"', "its token mask can't be computed"),
        ("grammar", "root ::= (", "Expected"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}', "Unsatisfiable"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "https://example.com/a.json"}', "retriev"),
        ("json_schema", '{"$ref": "#"}', "its token mask can't be computed"),
    ],
)
def test_a_grammar_that_no_text_can_follow_is_refused_by_name(kind: str, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        constraint(text, kind)
    assert str(refused.value).startswith(f"{kind}: ")
    assert reason in str(refused.value)
    assert "no_forcing" not in str(refused.value)


def test_a_grammar_that_no_token_can_spell_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^regex: "):
        constraint("x")


def test_a_response_that_becomes_too_large_is_refused_and_reveals_no_token() -> None:
    matcher = constraint("((((a{1,30}){1,30}){1,30}){1,30}){1,30}").start(frozenset())
    with pytest.raises(InvalidRequest) as refused:
        accept_many(matcher)
    assert str(refused.value) == (
        "regex: its token mask can't be computed: lexer error: too many expressions constructed"
    )
    matcher.accept(AA)
    assert not matcher.is_finished
    with pytest.raises(InvalidRequest):
        matcher.allowed()


def accept_many(matcher: GrammarMatcher) -> None:
    for _ in range(1000):
        assert not matcher.is_finished
        matcher.allowed()
        matcher.accept(AA)


def test_after_a_token_that_is_not_allowed_the_matcher_refuses() -> None:
    matcher: GrammarMatcher = constraint("ab").start(frozenset())
    matcher.accept(2)
    assert not matcher.is_finished
    with pytest.raises(InvalidRequest, match=r"^regex: "):
        matcher.allowed()


def test_where_a_special_token_may_follow_the_completion_does_not_end() -> None:
    matcher = constraint('start: <[15]> "a"', "grammar").start({16})
    assert np.flatnonzero(matcher.allowed()).tolist() == [15]
    matcher.accept(15)
    assert np.flatnonzero(matcher.allowed()).tolist() == [0]
    matcher.accept(0)
    assert matcher.is_finished
