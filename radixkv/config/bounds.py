"""Bounds of configuration keys, given in their type annotations, and the check of a section against them."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from radixkv.errors import ConfigError

_TOML_TYPES = {str: "a string", int: "an integer", float: "a number", bool: "a boolean"}


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `min` to `max`, both included; without an upper bound if `max` is None."""

    min: float
    max: float | None = None

    def require(self, path: str, value: float) -> None:
        """Raise `ConfigError` if a number is out of range.

        >>> Range(0, 65535).require("server.port", 70000)
        Traceback (most recent call last):
            ...
        radixkv.errors.ConfigError: server.port: expected 0 to 65535, got 70000
        """
        if not (self.min <= value and (self.max is None or value <= self.max)):
            expected = f"at least {self.min}" if self.max is None else f"{self.min} to {self.max}"
            raise ConfigError(f"{path}: expected {expected}, got {value}")


class OneOf:
    """The set of values that a key accepts."""

    def __init__(self, *values: object) -> None:
        self._values = values

    def require(self, path: str, value: object) -> None:
        """Raise `ConfigError` if a value is not in the set."""
        if value not in self._values:
            raise ConfigError(
                f"{path}: expected one of {', '.join(map(str, self._values))}, got {str(value) or repr(value)}"
            )


def require_fields(path: str, section: Any) -> None:
    """Check the type and the bounds of every field of a dataclass.

    Args:
        path: name of the section.
        section: a dataclass whose fields are str, int, float or bool, perhaps `Annotated` with bounds or optional
            (`| None`).

    Raises:
        ConfigError: the message names the key, the expected and the actual value.
    """
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        union_members = () if get_origin(hint) is Annotated else get_args(hint)
        if value is None and NoneType in union_members:
            continue
        value_hint = next((member for member in union_members if member is not NoneType), hint)
        kind, *bounds = get_args(value_hint) if get_origin(value_hint) is Annotated else (value_hint,)
        accepted_types = (int, float) if kind is float else (kind,)
        is_other_bool = isinstance(value, bool) and kind is not bool  # in Python, a bool is also an int
        if is_other_bool or not isinstance(value, accepted_types):
            raise ConfigError(f"{path}.{name}: expected {_TOML_TYPES[kind]}, got {value!r}")
        for bound in bounds:
            bound.require(f"{path}.{name}", value)
