"""Grammars as callers write them: JSON schemas, regular expressions and grammars in two syntaxes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidRequest

# Maximum length in characters. The time and the stack that a grammar needs grow with its length; README.md has the
# worst cases that were found.
MAX_CHARS = {"json_schema": 65_536, "regex": 4_096, "grammar": 16_384}

# White space between the parts of JSON. Without a bound, a model may generate nothing else.
_WHITESPACE = r"[ \n\r\t]{1,32}"
_WHITESPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}

# Do not force the canonical tokens of known text: the model chooses among all tokens that fit.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

# Detects a grammar in Lark's syntax, as opposed to llama.cpp's, in linear time; llguidance's own detection holds the
# GIL for seconds on many empty lines.
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)

# The first rule of a grammar in llama.cpp's syntax.
_ROOT = re.compile(r"\broot[ \t]*::=")

_MAX_REASON_CHARS = 300
# The beginning of the copy of the grammar that ends an error message of llguidance.
_COPY_BEGIN = re.compile(r"\n *[0-9]+ \| |\n<non-verbose/>")


def one_line_reason(reason: object) -> str:
    """Return the beginning of an error message of llguidance on one line, without the copy of the grammar."""
    return " ".join(_COPY_BEGIN.split(str(reason))[0].split())[:_MAX_REASON_CHARS]


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar that constrains a completion.

    Attributes:
        field: name of the request's field, for error messages.
        kind: `json_schema`, `regex` or `grammar`.
        text: a JSON schema, a regular expression of Rust's crate regex, or a grammar in Lark's syntax or llama.cpp's.
    """

    field: str
    kind: str
    text: str

    @classmethod
    def of_json_object(cls, field: str) -> GrammarText:
        """Return the grammar of all JSON objects."""
        return cls(field, "json_schema", '{"type": "object"}')

    @classmethod
    def of_choices(cls, field: str, choices: Sequence[str]) -> GrammarText:
        """Return the grammar of exactly these choices.

        Raises:
            InvalidRequest: there are no choices.
        """
        if not choices:
            raise InvalidRequest(f"{field}: expected at least 1 text, got 0")
        return cls(field, "grammar", f"start: {' | '.join(json.dumps(choice) for choice in choices)}")

    def require_short(self) -> None:
        """Refuse a grammar that is too long.

        Raises:
            InvalidRequest: the message names the field.
        """
        if len(self.text) > MAX_CHARS[self.kind]:
            raise InvalidRequest(
                f"{self.field}: expected at most {MAX_CHARS[self.kind]} characters, got {len(self.text)}"
            )

    def lark(self) -> str:
        """Translate the grammar to llguidance's Lark syntax, without validating the result.

        Raises:
            InvalidRequest: a schema is neither a JSON object nor `true`, or a grammar cannot be translated. The message
                names the field.
        """
        if self.kind == "json_schema":
            return f"start: {self.json_expression()}{_OPTIONS}"
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
            raise InvalidRequest(f"{self.field}: expected a grammar, got {one_line_reason(error)}") from error

    def json_expression(self) -> str:
        """Return a JSON schema as an expression in llguidance's Lark syntax.

        Raises:
            InvalidRequest: the text is not JSON, or not a schema. The message names the field.
        """
        return f"%json {json.dumps(self._schema())}"

    def _schema(self) -> dict[str, Any]:
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{self.field}: expected a JSON schema, got invalid JSON: {error}") from error
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{self.field}: expected a JSON schema, got {type(schema).__name__}")
        options = schema.get("x-guidance", {})
        if isinstance(options, dict) and not _WHITESPACE_OPTIONS & options.keys():
            schema["x-guidance"] = {**options, "whitespace_pattern": _WHITESPACE}
        return schema
