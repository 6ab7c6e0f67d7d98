"""Reads trees of keys from TOML files and `section.key=value` settings, and puts them over frozen dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KEY = re.compile(r'"[^"]+"|[^".]+')
_Section = TypeVar("_Section", bound="DataclassInstance")


def read_file(file: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: it can't be read, or is not TOML.
    """
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {file}: expected UTF-8, got other bytes") from error
    except (ValueError, RecursionError) as error:  # tomllib raises its own and those of int()
        raise ConfigError(f"config file {file}: {error}") from error


def read_setting(setting: str) -> dict[str, Any]:
    """Read a setting as a tree of tables. A name with dots is quoted, as in TOML.

    >>> read_setting('tenants."example.com".weight=2')
    {'tenants': {'example.com': {'weight': 2}}}

    Raises:
        ConfigError: it has no section, no key or no value.
    """
    path, equals, text = setting.partition("=")
    keys = _KEY.findall(path.strip())
    if not equals or len(keys) < 2 or ".".join(keys) != path.strip():
        raise ConfigError(f"setting: expected section.key=value, got {setting!r}")
    try:
        tree: Any = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        tree = text.strip()  # a bare word is a string
    for key in reversed(keys):
        tree = {key.strip('"'): tree}
    return cast("dict[str, Any]", tree)


def table(path: str, values: object) -> Mapping[str, Any]:
    """Return `values` if they are a table of keys.

    Raises:
        ConfigError: they are something else.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a table of keys, got {values!r}")
    return values


def laid_over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with the keys of two: tables are joined, and of two other values that of `upper` stays.

    >>> laid_over({"server": {"host": "a", "port": 1}}, {"server": {"port": 2}})
    {'server': {'host': 'a', 'port': 2}}
    """
    joined = {
        key: laid_over(lower[key], value)
        for key, value in upper.items()
        if isinstance(value, Mapping) and isinstance(lower.get(key), Mapping)
    }
    return {**lower, **upper, **joined}


def require_known(path: str, known: Iterable[str]) -> None:
    """Refuse a path that is not known, and name the nearest one that is."""
    paths = list(known)
    if path not in paths:
        nearest = difflib.get_close_matches(path, paths, n=1, cutoff=0.0)
        raise ConfigError(f"{path}: unknown key; the nearest is {nearest[0]}")


def section_with(path: str, section: _Section, values: object) -> _Section:
    """Return a copy of a section in which some keys are replaced; the copy checks their types and bounds itself.

    Raises:
        ConfigError: `values` is not a table, a key is unknown, or a value is refused.
    """
    replaced = table(path, values)
    known = [f"{path}.{each.name}" for each in dataclasses.fields(section)]
    for key in replaced:
        require_known(f"{path}.{key}", known)
    return dataclasses.replace(section, **replaced)
