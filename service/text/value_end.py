"""Incremental search for the end of a value in JSON or in Python's notation."""

from __future__ import annotations

import re

_MAX_DEPTH = 128
_CLOSING = {"{": "}", "[": "]", "(": ")"}
# Characters outside of strings that are no brackets, by the characters that enclose strings.
_PLAIN = {
    '"': re.compile(r"[\w\s.,:+-]*"),
    "\"'": re.compile(r"[\w\s.,:+=-]*"),
}
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}


class ValueEnd:
    """Finds the end of an object or list that arrives in pieces. Each character is read once.

    >>> end = ValueEnd(0)
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
