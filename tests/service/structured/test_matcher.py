"""Token masks, compared with all possible strings; ends; dead ends; masks that take too long."""

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
VOCABULARY = Vocabulary.of_names(NAMES, SPECIAL)
LONGEST = 6  # letters of the strings that are examined

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
    """All strings of letters that are text."""
    found = {}
    for count in range(LONGEST + 1):
        for letters in itertools.product(LETTERS, repeat=count):
            try:
                found[b"".join(letters)] = b"".join(letters).decode()
            except UnicodeDecodeError:
                continue
    return found


def language(pattern: str) -> set[bytes]:
    return {spelled for spelled, text in texts().items() if re.fullmatch(pattern, text)}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_allowed_tokens_are_those_that_continue_some_string(pattern: str) -> None:
    strings = language(pattern)
    prefixes = {spelled[:upto] for spelled in strings for upto in range(len(spelled) + 1)}
    ready = constraint(pattern)
    draws = random.Random(pattern)
    for _ in range(20):
        matcher, spelled = ready.start(frozenset({16})), b""
        while len(spelled) < LONGEST - 3:  # what may come is seen in strings that are some letters longer
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
    ready = constraint("b*")
    ends = {stops: set(np.flatnonzero(ready.start(stops).allowed()).tolist()) for stops in map(frozenset, ((), (16,)))}
    assert ends[frozenset()] == {1}
    assert ends[frozenset({16})] == {1, 16}
    both = ready.start(frozenset({15, 16, 2}))
    assert set(np.flatnonzero(both.allowed()).tolist()) == {1, 15, 16}


def test_a_matcher_follows_the_texts_of_its_grammar() -> None:
    ready = constraint("ab|bc")
    first, second = ready.start(frozenset()), ready.start(frozenset())
    first.accept(0)
    second.accept(1)
    assert np.flatnonzero(first.allowed()).tolist() == [1]
    assert np.flatnonzero(second.allowed()).tolist() == [2]
    assert np.flatnonzero(ready.start(frozenset()).allowed()).tolist() == [0, 1, 6, 7, 13]


def test_the_allowed_tokens_are_computed_once_per_token() -> None:
    now_s = itertools.count()
    ready = GrammarConstraint(GrammarText("regex", "regex", "a*"), VOCABULARY, clock=lambda: 0.0 * next(now_s))
    matcher, before = ready.start(frozenset()), next(now_s)
    assert not matcher.is_finished
    for _ in range(3):
        assert matcher.allowed() is matcher.allowed()
    assert next(now_s) == before + 3, "two times of one search"


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
        repeat_a(matcher)
    assert str(refused.value) == (
        "regex: its token mask can't be computed: lexer error: too many expressions constructed"
    )
    matcher.accept(9)
    assert not matcher.is_finished
    with pytest.raises(InvalidRequest):
        matcher.allowed()


def repeat_a(matcher: GrammarMatcher) -> None:
    for _ in range(1000):
        assert not matcher.is_finished
        matcher.allowed()
        matcher.accept(9)


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
