"""Tool calls in the text of a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.service.text.tool_formats import ToolFormat

_ARGUMENTS_KEYS = ("arguments", "parameters")
_MAX_HEADER_CHARS = 512  # between the beginning of a call and its arguments
_NAME = r"[^\s<>{}()\[\]\"']+"
_NOT_IN_NAME = ("{", "[", "<", '"')  # with which a name cannot begin
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# The brackets with which the text in place of a placeholder may begin.
_BRACKETS = {"call": "{[", "calls": "{[", "python": "["}
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
# In Python's notation: a string, the name of a function, a number, the name of an argument, a constant, or a bracket.
_PYTHON = re.compile(
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([\w.-]+)\s*\(|(?:\d[\d.]*(?:[eE][+-]?\d+)?)|"""
    r"""([A-Za-z_]\w*)\s*=|([A-Za-z_]\w*)|\)""",
    re.DOTALL,
)

_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"([{,]\s*)([\w.$-]+)\s*:")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}

_MAX_DEPTH = 128  # of nested brackets in a value
_CLOSING = {"{": "}", "[": "]", "(": ")"}
# Characters outside of strings that are no brackets, by the characters that enclose strings.
_PLAIN = {
    '"': re.compile(r"[\w\s.,:+-]*"),
    "\"'": re.compile(r"[\w\s.,:+=-]*"),
}
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: name of the tool.
        arguments: a JSON object.
    """

    name: str
    arguments: Mapping[str, Any]


class ToolCallText:
    """Separates the text of a completion, which arrives in pieces, from its calls.

    Text that begins like a call but is not one is returned as text. White space around calls is left out.

    >>> from radixkv.service.text.tool_formats import TOOL_FORMATS
    >>> text = ToolCallText(TOOL_FORMATS["hermes"], {})
    >>> text.put('Let me see. <tool_call>{"name": "clock", "argu'), text.put('ments": {}}</tool_call>')
    (['Let me see.'], [ToolCall(name='clock', arguments={})])

    Args:
        form: the format of calls.
        schemas: the JSON schemas of the arguments of each tool, by its name. Text without a tag is a call only if it
            names one of these tools.
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._variants = [_Variant(each, form) for each in form.variants]
        self._schemas = schemas
        self._prefix = form.prefix
        self._suffix = form.suffix
        self._separator = form.separator.strip()
        self._begins = tuple({each.begin for each in self._variants if each.begin} | ({self._prefix} - {""}))
        self._bare_brackets = "".join(each.brackets for each in self._variants if not each.begin)
        self._held = ""
        self._gap = ""  # white space that belongs to the text unless a call follows it
        self._reader: _CallReader | None = None  # reads a call at the beginning of the held text
        self._is_start = True  # whether there was only white space since the beginning, or since the last call
        self._is_after_call = False

    def put(self, piece: str) -> list[str | ToolCall]:
        """Add a piece. Returns the text that belongs to no call, and the calls that are complete, in their order."""
        self._held += piece
        return self._read(is_last=False)

    def end(self) -> list[str | ToolCall]:
        """End the text after its last piece: return the text and the calls that were held back."""
        parts = self._read(is_last=True)
        if not self._is_after_call:
            self._add_text(parts, "")  # adds the white space that was held back
        return parts

    def _read(self, *, is_last: bool) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        while self._held and (self._reader is not None or self._find_call(parts, is_last=is_last)):
            assert self._reader is not None
            try:
                result = self._reader.read(self._held, is_last=is_last)
                may_be_call = result is not None or not is_last
            except ValueError:
                may_be_call = False
            if not may_be_call:  # its first character is text; a call may begin at the next one
                self._reader = None
                self._is_start = self._is_after_call = False
                self._add_text(parts, self._held[0])
                self._held = self._held[1:]
                continue
            if result is None:
                break
            end, calls = result
            parts += calls
            self._reader, self._held, self._gap = None, self._held[end:], ""
            self._is_start = self._is_after_call = True
        return parts

    def _find_call(self, parts: list[str | ToolCall], *, is_last: bool) -> bool:
        """Add the text before a possible call to `parts`. Returns whether there is a possible call."""
        if self._is_start:
            text = self._held.lstrip()
            if not self._is_after_call:
                self._gap += self._held[: len(self._held) - len(text)]
            self._held = text
            if self._is_after_call and self._suffix:
                if text.startswith(self._suffix):
                    self._held = text[len(self._suffix) :]
                    return self._find_call(parts, is_last=is_last)
                if self._suffix.startswith(text) and not is_last:
                    return False
            has_separator = self._is_after_call and bool(self._separator) and text.startswith(self._separator)
            if text and (text[0] in self._bare_brackets or has_separator):
                self._reader = self._new_reader(self._separator if has_separator else "")
                return True

        begin = min((at for at in map(self._held.find, self._begins) if at >= 0), default=-1)
        text_end = begin if begin >= 0 else len(self._held)
        if begin < 0 and not is_last:
            text_end -= _num_partial_chars(self._held, self._begins)
        text_before = self._held[:text_end].rstrip()
        if text_before:
            self._is_start = self._is_after_call = False
            self._add_text(parts, text_before)
        if not self._is_after_call:
            self._gap += self._held[len(text_before) : text_end]
        self._held = self._held[text_end:]
        if begin >= 0:
            self._reader = self._new_reader(self._prefix)
        return begin >= 0

    def _new_reader(self, lead: str) -> _CallReader:
        return _CallReader(self._variants, self._schemas, lead)

    def _add_text(self, parts: list[str | ToolCall], text: str) -> None:
        """Add the white space before a text, and the text, to `parts`."""
        text, self._gap = self._gap + text, ""
        if text and parts and isinstance(parts[-1], str):
            parts[-1] += text
        elif text:
            parts.append(text)


class _Variant:
    """A way to write a call, see `ToolFormat`.

    Args:
        text: the text of a call with its placeholders.
        form: the format that the variant belongs to.

    Attributes:
        begin: the first line of the text before the first placeholder, with which a call begins; may be empty.
        within: the other lines of the text before the first placeholder.
        brackets: the brackets that may begin the call after `begin`; empty if the name comes first.
        is_python: whether calls are in Python's notation.
        header: pattern of the text between `begin` and the arguments, or the object or list that contains them.
        quote: the text that encloses strings in the arguments; empty for the quotes of JSON.
        argument: pattern of an argument with tags of its own; None if the arguments are a JSON object.
        end: the text that ends a call; may be empty.
        last_line: the last line of `end`.
        lines_before: the other lines of `end`.
    """

    def __init__(self, text: str, form: ToolFormat) -> None:
        first = _PLACEHOLDER.search(text)
        assert first is not None
        value_placeholder = next(each for each in _PLACEHOLDER.finditer(text) if each[1] not in ("name", "id"))
        self.begin, _, self.within = text[: first.start()].partition("\n")
        self.is_python = first[1] == "python"
        self.brackets = _BRACKETS.get(first[1], "")
        self.end = text[value_placeholder.end() :].strip()
        header = text[len(self.begin) : value_placeholder.start()]
        self.header = re.compile(rf"\s*{_pattern(header)}\s*", re.DOTALL)
        self.quote = form.quote
        self.argument = re.compile(rf"\s*{_pattern(form.argument)}\s*", re.DOTALL) if form.argument else None
        self.last_line = self.end.rpartition("\n")[2]
        self.lines_before = self.end.removesuffix(self.last_line).strip()


class _CallReader:
    """Reads one call, or a list of calls, at the beginning of a text that arrives in pieces.

    Args:
        variants: the ways to write a call.
        schemas: schemas of the arguments, by the name of the tool.
        lead: text that may come before the call.
    """

    def __init__(self, variants: Sequence[_Variant], schemas: Mapping[str, Mapping[str, Any]], lead: str) -> None:
        self._variants = variants
        self._schemas = schemas
        self._lead = lead
        self._matching: list[_Variant] = []  # the variants that the text may follow; empty if not known yet
        self._start = 0  # end of `begin` of these variants
        self._header: re.Match[str] | None = None  # the text before the arguments, if the name comes first
        self._value: _ValueEnd | None = None  # finds the end of the arguments, or of the object or list with them
        self._value_start = 0
        self._num_searched = 0  # the end of the call does not begin before this position

    def read(self, text: str, *, is_last: bool) -> tuple[int, list[ToolCall]] | None:
        """Return the end of the calls and the calls; None if they are not complete.

        Args:
            text: the text so far; it begins with the text that was passed before.
            is_last: whether no more text follows.

        Raises:
            ValueError: there is no call.
        """
        if not self._matching and not self._match_variants(text):
            return None
        if self._matching[0].argument is not None:
            return self._read_arguments(text, self._matching[0])
        if self._value is None and not self._find_value(text):
            return None
        if self._matching[0].quote:
            return self._read_quoted(text, self._matching[0])
        assert self._value is not None
        value_end = self._value.find(text)
        if value_end is None:
            return None
        end = self._find_end(text, value_end, is_last=is_last)
        if end is None:
            return None
        return end, self._parse_calls(text[self._value_start : value_end])

    def _match_variants(self, text: str) -> bool:
        """Find the variants that the text may follow. Return False if the text is too short to decide."""
        call_start = 0
        if self._lead and text.startswith(self._lead):
            call_start = _skip_space(text, len(self._lead))
        elif self._lead and self._lead.startswith(text):
            return False
        call = text[call_start : call_start + _MAX_HEADER_CHARS]
        if not call or any(len(each.begin) > len(call) and each.begin.startswith(call) for each in self._variants):
            return False
        longest = max((each.begin for each in self._variants if call.startswith(each.begin)), key=len, default=None)
        if longest is None:
            raise ValueError("no call begins here")
        self._matching = [each for each in self._variants if each.begin == longest]
        self._start = call_start + len(longest)
        return True

    def _find_value(self, text: str) -> bool:
        """Find the beginning of the arguments, or of the object or list with them. Return whether it has arrived."""
        at = _skip_space(text, self._start)
        if at == len(text):
            return False
        matching = [each for each in self._matching if text[at] in each.brackets]
        if not matching:
            if all(each.brackets for each in self._matching):
                raise ValueError("there is no object or list")
            at = text.find("{", self._start, self._start + _MAX_HEADER_CHARS)
            if at < 0:
                if len(text) - self._start < _MAX_HEADER_CHARS:
                    return False
                raise ValueError("there are no arguments")
            for variant in self._matching:
                self._header = None if variant.brackets else variant.header.fullmatch(text, self._start, at)
                if self._header is not None:
                    matching = [variant]
                    break
            else:
                raise ValueError("there is no name")
        self._matching = matching
        self._value_start = at
        self._value = _ValueEnd(at, "\"'" if matching[0].is_python else '"')
        return True

    def _find_end(self, text: str, at: int, *, is_last: bool) -> int | None:
        """Return the end of a call whose arguments end at a position; None if it is not known yet.

        The text that ends a call may be missing at the end of a completion, because it may have stopped there.
        """
        after = _skip_space(text, at)
        for end in sorted({each.end for each in self._matching}, key=len, reverse=True):
            if not end:
                return at
            if text.startswith(end, after):
                return after + len(end)
            if end.startswith(text[after:]):
                return len(text) if is_last else None
        raise ValueError("something else follows the call")

    def _parse_calls(self, value: str) -> list[ToolCall]:
        if self._header is not None:
            arguments = _json(value)
            if not isinstance(arguments, dict):
                raise ValueError("the arguments are no object")
            return [ToolCall(self._header["name"], arguments)]
        variant = self._matching[0]
        parsed = _json(_python_to_json(value) if variant.is_python else value)
        calls = list(_read_calls(parsed if isinstance(parsed, list) else [parsed], is_bare=not variant.begin))
        if not calls or (not variant.begin and any(each.name not in self._schemas for each in calls)):
            raise ValueError("there is no call of a tool")
        return calls

    def _read_quoted(self, text: str, variant: _Variant) -> tuple[int, list[ToolCall]] | None:
        """Read a call whose text has other quotes than JSON."""
        assert self._header is not None
        start = self._value_start
        end = text.find(variant.end, max(start, self._num_searched))  # position at which `variant.end` begins
        while end >= 0 and text.count(variant.quote, start, end) % 2:  # this position is inside of a string
            end = text.find(variant.end, end + 1)
        if end < 0:
            self._num_searched = len(text) - len(variant.end)
            return None
        arguments = _json(_quoted_to_json(text[start:end].rstrip(), variant.quote))
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no object")
        return end + len(variant.end), [ToolCall(self._header["name"], arguments)]

    def _read_arguments(self, text: str, variant: _Variant) -> tuple[int, list[ToolCall]] | None:
        """Read a call whose arguments have tags of their own."""
        assert variant.argument is not None
        at = _skip_space(text, self._start)
        before_name = text[at : at + len(variant.within)]
        if not variant.within.startswith(before_name):
            raise ValueError("there is no name")
        if not variant.within and text[at : at + 1] in _NOT_IN_NAME:
            raise ValueError("there is no name")

        # Find the end of the call; white space between its lines may differ.
        while True:
            last_line_start = text.find(variant.last_line, max(at, self._num_searched))
            if last_line_start < 0:
                self._num_searched = len(text) - len(variant.last_line)
                return None
            body_end = _strip_space(text, last_line_start)
            if text.endswith(variant.lines_before, 0, body_end):
                break
            self._num_searched = last_line_start + 1
        body_end -= len(variant.lines_before)

        # Read the name and the arguments, which must fill the text up to that end.
        header = variant.header.match(text, self._start, body_end)
        if header is None:
            raise ValueError("there is no name")
        schema = self._schemas.get(header["name"], {})
        arguments, at = {}, header.end()
        while at < body_end:
            argument = variant.argument.match(text, at, body_end)
            if argument is None:
                raise ValueError("there is something other than arguments")
            arguments[argument["key"]] = _value_of(argument["value"], argument["key"], schema)
            at = argument.end()
        _require_unicode(arguments)
        return last_line_start + len(variant.last_line), [ToolCall(header["name"], arguments)]


class _ValueEnd:
    """Finds the end of an object or list that arrives in pieces. Each character is read once.

    >>> end = _ValueEnd(0)
    >>> end.find('{"a": "}'), end.find('{"a": "}", "b": []} and more')
    (None, 19)

    Args:
        start: where the value begins in the text.
        quotes: characters that enclose strings: `"`, or `"'` in Python's notation.
    """

    def __init__(self, start: int, quotes: str = '"') -> None:
        self._position = start
        self._quotes = quotes
        self._plain = _PLAIN[quotes]
        self._quote = ""  # the quote that ends the string at this position; empty outside of strings
        self._closing: list[str] = []  # the closing brackets of the brackets that are open
        self._end: int | None = None

    def find(self, text: str) -> int | None:
        """Return the end of the value; None if it is not complete.

        Args:
            text: the text so far; it begins with the text of the previous call.

        Raises:
            ValueError: the text is no value, or it is nested too deeply.
        """
        while self._end is None:
            skipped = _IN_STRING[self._quote] if self._quote else self._plain
            match = skipped.match(text, self._position)
            assert match is not None, "the pattern matches the empty text as well"
            self._position = match.end()
            is_escape = bool(self._quote) and text.startswith("\\", self._position)
            num_chars = 2 if is_escape else 1
            if len(text) - self._position < num_chars:
                return None
            char = text[self._position]
            self._position += num_chars
            if self._quote:
                if not is_escape:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in _CLOSING and len(self._closing) < _MAX_DEPTH:
                self._closing.append(_CLOSING[char])
            elif self._closing and char == self._closing[-1]:
                self._closing.pop()
                if not self._closing:
                    self._end = self._position
            else:
                raise ValueError("not a value")
        return self._end


def _pattern(text: str) -> str:
    """Return a regular expression for a text with placeholders, in which white space may differ, except in a value."""
    pieces = _PLACEHOLDER.split(text)  # texts and names of placeholders in turn
    literals, placeholders = pieces[::2], ["", *pieces[1::2], ""]
    patterns = []
    for index, literal in enumerate(literals):
        before, after = placeholders[index], placeholders[index + 1]
        # White space next to a value belongs to the value, apart from a line break that the format writes there.
        if before == "value" and literal.startswith("\n"):
            patterns.append("\n?")
        patterns.append(r"\s*".join(re.escape(line.strip()) for line in literal.strip("\n").split("\n")))
        if after != "value":
            patterns.append(r"\s*")
        elif literal.endswith("\n"):
            patterns.append("\n?")

        if after == "value":
            patterns.append("(?P<value>.*?)")
        elif after == "id":
            patterns.append(r"[^\s{]*?\s*")
        elif after:
            patterns.append(rf"(?P<{after}>{_NAME})\s*")
    return "".join(patterns)


def _num_partial_chars(text: str, begins: Sequence[str]) -> int:
    """Return how many of the last characters of a text may be the beginning of one of `begins`."""
    longest = max(map(len, begins), default=1) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(each.startswith(text[-n:]) for each in begins)), 0
    )


def _skip_space(text: str, at: int) -> int:
    """Return the position of the first character, from `at` on, that is no white space."""
    space = _SPACE.match(text, at)
    assert space is not None, "the pattern matches the empty text as well"
    return space.end()


def _strip_space(text: str, end: int) -> int:
    """Return the position after the last character before `end` that is no white space."""
    while end and text[end - 1].isspace():
        end -= 1
    return end


def _json(text: str) -> Any:
    """Return the value of JSON text, whose strings may contain control characters. Raises ValueError."""
    try:
        parsed = json.loads(text, strict=False)
    except RecursionError as error:
        raise ValueError("too deep") from error
    _require_unicode(parsed)
    return parsed


def _require_unicode(value: Any) -> None:
    """Raise ValueError if a value contains NaN, infinite numbers or lone surrogates."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _read_calls(values: Sequence[Any], *, is_bare: bool) -> Iterator[ToolCall]:
    """Convert JSON objects to calls. Without a tag (`is_bare`), an object is a call only if it has arguments.

    Raises:
        ValueError: a value is not a call.
    """
    for value in values:
        call = value if isinstance(value, dict) else {}
        keys = [each for each in _ARGUMENTS_KEYS if each in call]
        arguments = call[keys[0]] if keys else {}
        if not isinstance(call.get("name"), str) or not call["name"] or not isinstance(arguments, dict):
            raise ValueError("there is no name, or the arguments are no object")
        if is_bare and not keys:
            raise ValueError("there are no arguments")
        yield ToolCall(call["name"], arguments)


def _python_to_json(text: str) -> str:
    """Return a list of calls in Python's notation as a list of JSON objects; invalid JSON for anything else."""

    def translate(match: re.Match[str]) -> str:
        string, function, argument, constant = match.groups()
        if string is not None:
            return json.dumps(_python_string(string))
        if function is not None:
            return f'{{"name": {json.dumps(function)}, "arguments": {{'
        if argument is not None:
            return f"{json.dumps(argument)}:"
        if constant is not None:
            return json.dumps(_CONSTANTS[constant]) if constant in _CONSTANTS else "invalid"
        return "}}" if match[0] == ")" else match[0]

    return _PYTHON.sub(translate, text)


def _quoted_to_json(text: str, quote: str) -> str:
    """Return JSON for a value whose keys have no quotes, and whose text is enclosed in another quote."""
    parts = text.split(quote)  # every second one is the content of a string
    parts[1::2] = [json.dumps(each) for each in parts[1::2]]
    parts[::2] = [_KEY.sub(r'\1"\2":', each) for each in parts[::2]]
    return "".join(parts)


def _python_string(literal: str) -> str:
    """Return the text of a string in Python's notation. Unknown escapes stay as they are, with their backslash."""

    def unescape(match: re.Match[str]) -> str:
        return chr(int(match[1][1:], 16)) if match[2] is None else _ESCAPES.get(match[2], match[0])

    return _ESCAPE.sub(unescape, literal[1:-1])


def _value_of(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument: JSON and constants are parsed, unless the schema allows only text."""
    properties = schema.get("properties")
    value_schema = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(value_schema, Mapping) and _allows_only_text(value_schema):
        return text
    stripped = text.strip()
    if stripped in _CONSTANTS:
        return _CONSTANTS[stripped]
    try:
        return _json(stripped)
    except ValueError:
        return text


def _allows_only_text(schema: Mapping[str, Any]) -> bool:
    if schema.get("type") == "string":
        return True
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return "type" not in schema and bool(values) and all(isinstance(each, str) for each in values)
