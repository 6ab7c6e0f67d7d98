"""Texts that say what an answer must follow, as callers write them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidRequest

# A text is as long as this at most, in characters. A grammar takes the more time, and the more stack, the longer it is;
# README.md has the worst of each that was found.
MAX_CHARS = {"json_schema": 65_536, "regex": 4_096, "grammar": 16_384}

# White space between the parts of JSON. Without a bound a model may write nothing else.
_WHITESPACE = r"[ \n\r\t]{1,32}"
_WHITESPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}

# The model chooses among all tokens that fit, also where the text is known and a tokenizer would choose one of them.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


# A grammar in Lark's syntax, not llama.cpp's. Takes no longer than the text is; llguidance's own search holds the
# interpreter for seconds over many empty lines.
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)

# The first rule of a grammar in llama.cpp's syntax.
_ROOT = re.compile(r"\broot[ \t]*::=")

_MOST_REASON_CHARS = 300
_EXCERPT = re.compile(r"\n *[0-9]+ \| |\n<non-verbose/>")  # what follows is the grammar again


def in_a_line(reason: object) -> str:
    """Return the beginning of what a library says, without breaks of lines and without the grammar."""
    return " ".join(_EXCERPT.split(str(reason))[0].split())[:_MOST_REASON_CHARS]


@dataclass(frozen=True, slots=True)
class GrammarText:
    """Text that says what an answer must follow.

    Attributes:
        field: the caller's name for it, for messages.
        kind: `json_schema`, `regex` or `grammar`.
        text: a JSON schema, a regular expression of Rust's crate regex, or a grammar in Lark's syntax or llama.cpp's.
    """

    field: str
    kind: str
    text: str

    @classmethod
    def of_json_object(cls, field: str) -> GrammarText:
        """Return what every JSON object follows."""
        return cls(field, "json_schema", '{"type": "object"}')

    @classmethod
    def of_choices(cls, field: str, choices: Sequence[str]) -> GrammarText:
        """Return what each of some texts follows, and nothing else.

        Raises:
            InvalidRequest: there are none.
        """
        if not choices:
            raise InvalidRequest(f"{field}: expected at least 1 text, got 0")
        return cls(field, "grammar", f"start: {' | '.join(json.dumps(choice) for choice in choices)}")

    def require_short(self) -> None:
        """Refuse a text that is too long.

        Raises:
            InvalidRequest: the message names the field.
        """
        if len(self.text) > MAX_CHARS[self.kind]:
            raise InvalidRequest(
                f"{self.field}: expected at most {MAX_CHARS[self.kind]} characters, got {len(self.text)}"
            )

    def lark(self) -> str:
        """Return it as a grammar for llguidance. Whether it is right, only llguidance knows.

        Raises:
            InvalidRequest: it is no JSON, or no grammar that can be translated. The message names the field.
        """
        if self.kind == "json_schema":
            return f"start: %json {json.dumps(self._schema())}{_OPTIONS}"
        if self.kind == "regex":
            from llguidance import LLMatcher

            grammars = json.loads(LLMatcher.grammar_from_regex(self.text))["grammars"]
            return f"{grammars[0]['lark_grammar']}{_OPTIONS}"
        if _LARK.search(self.text):
            return f"{self.text}{_OPTIONS}"
        if not _ROOT.search(self.text):
            raise InvalidRequest(
                f"{self.field}: expected a rule `start:` (Lark's syntax) or `root ::=` (llama.cpp's), got neither"
            )
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            return f"{gbnf_to_lark(self.text)}{_OPTIONS}"
        except Exception as error:
            raise InvalidRequest(f"{self.field}: expected a grammar, got {in_a_line(error)}") from error

    def _schema(self) -> dict[str, Any]:
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{self.field}: expected a JSON schema, got no JSON: {error}") from error
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{self.field}: expected a JSON schema, got {type(schema).__name__}")
        options = schema.get("x-guidance", {})
        if isinstance(options, dict) and not _WHITESPACE_OPTIONS & options.keys():
            schema["x-guidance"] = {**options, "whitespace_pattern": _WHITESPACE}
        return schema
