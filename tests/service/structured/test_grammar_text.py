import json
import re

import pytest

pytest.importorskip("llguidance")

from radixkv.errors import InvalidRequest
from radixkv.service.structured.grammar_text import MAX_CHARS, GrammarText, one_line_reason
from tests.service.structured.followed import follows


def grammar_text(kind: str, value: str) -> GrammarText:
    return GrammarText("my_field", kind, value)


def matching(grammar: GrammarText, *candidates: str) -> list[str]:
    """Return the candidates that are whole completions of the grammar."""
    return [candidate for candidate in candidates if follows(grammar, candidate)]


@pytest.mark.parametrize("kind", MAX_CHARS)
def test_long_texts_are_refused_by_name(kind: str) -> None:
    grammar_text(kind, "é" * MAX_CHARS[kind]).require_short()
    with pytest.raises(InvalidRequest) as refused:
        grammar_text(kind, "a" * (MAX_CHARS[kind] + 1)).require_short()
    assert str(refused.value) == (f"my_field: expected at most {MAX_CHARS[kind]} characters, got {MAX_CHARS[kind] + 1}")


@pytest.mark.parametrize(
    ("schema", "got"),
    [
        ("{", "invalid JSON: Expecting property name"),
        ("[" * 100_000, "invalid JSON: "),
        ("1" * 5_000, "invalid JSON: "),
        ("[]", "got list"),
        ('"object"', "got str"),
        ("null", "got NoneType"),
        ("3", "got int"),
    ],
)
def test_an_invalid_schema_is_refused_by_name(schema: str, got: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_text("json_schema", schema).lark()
    assert str(refused.value).startswith("my_field: expected a JSON schema, got ")
    assert got in str(refused.value)


def test_an_empty_schema_allows_any_json() -> None:
    for schema in ("true", "{}"):
        assert matching(grammar_text("json_schema", schema), "1", "[1, {}]", '"a"', "nul", "", "{") == [
            "1",
            "[1, {}]",
            '"a"',
        ]


def test_white_space_is_bounded_unless_the_caller_says_otherwise() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    little_space, much_space = '{\n "a": 1}', '{"a":' + 40 * " " + "1}"
    assert matching(grammar_text("json_schema", json.dumps(schema)), little_space, much_space, '{"a":1}') == [
        little_space,
        '{"a":1}',
    ]
    schema["x-guidance"] = {"whitespace_flexible": False}
    assert matching(grammar_text("json_schema", json.dumps(schema)), little_space, much_space, '{"a":1}') == ['{"a":1}']
    schema["x-guidance"] = {"whitespace_flexible": True}
    assert matching(grammar_text("json_schema", json.dumps(schema)), little_space, much_space) == [
        little_space,
        much_space,
    ]


def test_a_json_object_may_have_any_members() -> None:
    grammar = GrammarText.of_json_object("json_object")
    assert matching(grammar, "{}", '{"a": [1, "é"]}', "[]", "1", '{"a"}') == ["{}", '{"a": [1, "é"]}']


def test_choices_are_taken_literally() -> None:
    choices = ['a"b', "\\n", "line\nline", "é😀", "a|b", "%ignore"]
    grammar = GrammarText.of_choices("choice", choices)
    assert matching(grammar, *choices, "a", "b", "\n", "", "line") == choices


def test_no_choices_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^choice: expected at least 1 text, got 0$"):
        GrammarText.of_choices("choice", [])


def test_a_regex_matches_the_whole_completion() -> None:
    assert matching(grammar_text("regex", r"a/b\d+|^x$"), "a/b12", "x", "xx", "ya/b1", "a/b") == ["a/b12", "x"]


def test_grammars_in_the_syntax_of_lark_and_of_llama_cpp_are_accepted() -> None:
    lark = 'start: "a" b\nb: "b"+ // comment'
    for grammar in (lark, 'root ::= "a" b\nb ::= "b"+  # comment'):
        assert matching(grammar_text("grammar", grammar), "ab", "abb", "a", "b", "aab") == ["ab", "abb"]


def test_the_first_rule_determines_the_syntax() -> None:
    for lark in ('a: "x"\n  start : a', '%llguidance {}\nstart: "x"', '// root ::= "y"\nstart: "x"'):
        assert matching(grammar_text("grammar", lark), "x", "y") == ["x"]
    assert matching(grammar_text("grammar", 'root ::= started\nstarted ::= "x"'), "x", "y") == ["x"]
    with pytest.raises(InvalidRequest, match="Rule 'start' already exists"):
        grammar_text("grammar", 'root ::= start\nstart ::= "x"').lark()


def test_empty_lines_do_not_reach_the_slow_check_of_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import gbnf_to_lark

    monkeypatch.setattr(gbnf_to_lark, "is_lark_syntax", lambda _: pytest.fail("takes seconds"))
    empty = "\n" * 16_000
    assert grammar_text("grammar", f'{empty}start: "x"').lark().startswith(empty)
    with pytest.raises(InvalidRequest, match=r"got neither$"):
        grammar_text("grammar", empty).lark()


@pytest.mark.parametrize("grammar", ['begin: "a"', 'begin ::= "a"', 'rooted ::= "a"', 'begin: "a"\nother: begin'])
def test_the_error_for_a_grammar_without_a_first_rule_names_it(grammar: str) -> None:
    message = "my_field: expected a rule `start:` (Lark's syntax) or `root ::=` (llama.cpp's), got neither"
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        grammar_text("grammar", grammar).lark()


@pytest.mark.parametrize("grammar", ["", "root ::= (", "\x00", "(" * 16_384])
def test_an_invalid_grammar_is_refused_by_name(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^my_field: expected "):
        follows(grammar_text("grammar", grammar), "a")


def test_reasons_are_one_short_line_without_the_grammar() -> None:
    assert one_line_reason("regex (a\n  ^\nerror: unclosed\n   1 | start: /(a/\n  ^\n") == "regex (a ^ error: unclosed"
    assert one_line_reason("stopped\n<non-verbose/>") == "stopped"
    assert len(one_line_reason("a" * 5_000)) == 300
