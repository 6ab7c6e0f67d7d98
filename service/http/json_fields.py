"""Typed access to the fields of a JSON object in a request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from radixkv.errors import InvalidRequest

_MAX_SHOWN_CHARS = 80


class Fields:
    """Reads the fields of a JSON object, and refuses those that were not read. A field that is null counts as absent.

    >>> fields = Fields({"n": 2, "stream": None, "typo": 1})
    >>> fields.integer("n", 1, 8), fields.flag("stream")
    (2, False)
    >>> fields.require_no_others()
    Traceback (most recent call last):
    radixkv.errors.InvalidRequest: typo: this server does not know the field

    Args:
        values: the object.
        place: the path of the object in the request, for messages; empty for the request itself.

    Attributes:
        place: the argument `place`.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self.place = place
        self._unread = dict.fromkeys(self._values)

    @classmethod
    def of(cls, value: object, place: str) -> Fields:
        """Return the fields of a value that must be an object.

        Raises:
            InvalidRequest: it is no object.
        """
        if not isinstance(value, dict):
            raise InvalidRequest(f"{place}: expected an object, got {_shown(value)}")
        return cls(value, place)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def path_of(self, name: str) -> str:
        """Return the path of a field in the request."""
        return f"{self.place}.{name}" if self.place else name

    def any(self, name: str) -> Any:
        """Return a field of any type; None if it is absent."""
        self._unread.pop(name, None)
        return self._values.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """Return an integer from `low` to `high`.

        Raises:
            InvalidRequest: it is something else.
        """
        value: int | None = self._check(
            name, default, lambda value: _is_integer(value) and low <= value <= high, f"an integer from {low} to {high}"
        )
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float | None:
        """Return a number from `low` to `high`.

        Raises:
            InvalidRequest: it is something else.
        """
        value: float | None = self._check(
            name,
            default,
            lambda value: _is_number(value) and low <= value <= high,
            f"a number from {low:g} to {high:g}",
        )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false.

        Raises:
            InvalidRequest: it is something else.
        """
        return bool(self._check(name, default, lambda value: isinstance(value, bool), "true or false"))

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a string.

        Raises:
            InvalidRequest: it is something else.
        """
        text: str | None = self._check(name, default, lambda value: isinstance(value, str), "a string")
        return text

    def one_of(self, name: str, choices: Collection[str], default: str) -> str:
        """Return one of several strings.

        Raises:
            InvalidRequest: it is something else.
        """
        expected = f"one of {', '.join(choices)}"
        return str(self._check(name, default, lambda value: isinstance(value, str) and value in choices, expected))

    def items(self, name: str) -> list[Any]:
        """Return a list; an empty one if the field is absent.

        Raises:
            InvalidRequest: it is something else.
        """
        items: list[Any] = self._check(name, [], lambda value: isinstance(value, list), "a list") or []
        return items

    def integers(self, name: str) -> list[int]:
        """Return a list of integers that are not negative and fit into 32 bits; an empty one if the field is absent.

        Raises:
            InvalidRequest: it is something else.
        """
        values = self.items(name)
        for index, value in enumerate(values):
            if not _is_integer(value) or not 0 <= value < 2**32:
                raise InvalidRequest(f"{self.path_of(name)}[{index}]: expected a token id, got {_shown(value)}")
        return values

    def inner(self, name: str) -> Fields | None:
        """Return the fields of an object within this one; None if it is absent.

        Raises:
            InvalidRequest: it is something else.
        """
        value = self.any(name)
        return None if value is None else Fields.of(value, self.path_of(name))

    def require_neutral(self, reason: str, /, **neutral: Any) -> None:
        """Refuse fields that have an effect which this server does not support.

        Args:
            reason: why, as the end of the message.
            neutral: for each field, the value that has no effect, or a tuple of such values.

        Raises:
            InvalidRequest: a field has another value.
        """
        for name, expected in neutral.items():
            value = self.any(name)
            allowed = expected if isinstance(expected, tuple) else (expected,)
            if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
                shown = " or ".join(json.dumps(each) for each in allowed) or "no value"
                raise InvalidRequest(f"{self.path_of(name)}: expected {shown}, got {_shown(value)}; {reason}")

    def ignore(self, *names: str) -> None:
        """Accept fields without an effect on the answer, whatever their values are."""
        for name in names:
            self._unread.pop(name, None)

    def require_no_others(self) -> None:
        """Refuse fields that were not read.

        Raises:
            InvalidRequest: there are some.
        """
        for name in self._unread:  # the message names the first one
            raise InvalidRequest(f"{self.path_of(str(name))[:_MAX_SHOWN_CHARS]}: this server does not know the field")

    def _check(self, name: str, default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        value = self.any(name)
        if value is None:
            return default
        if not is_valid(value):
            raise InvalidRequest(f"{self.path_of(name)}: expected {expected}, got {_shown(value)}")
        return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _shown(value: object) -> str:
    """Return a value as JSON. Of strings, lists and objects, which may contain prompts, return only the type."""
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return json.dumps(value)[:_MAX_SHOWN_CHARS]
