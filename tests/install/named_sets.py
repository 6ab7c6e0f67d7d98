"""The sets of extras that the documentation recommends to install, and their requirements in pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Files that say what to install.
_PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    "docs/**/*.md",
    "service/**/*.md",
    "radixkv/**/*.md",
    "bench/**/*.md",
)
_DEPLOY = ("docs/deploy/Dockerfile", "docs/deploy/radixkv.service")
# '.[engine,text]' and "$(echo *.whl)[engine]", as arguments of pip
_ARGUMENT = re.compile(r"(?:\.|\.whl\)?)\[([a-z]+(?:,[a-z]+)*)\]")
# `EXTRAS_demo := engine,plot`, a variable of the Makefile
_VARIABLE = re.compile(r"^EXTRAS_\S+\s*:?=\s*([a-z]+(?:,[a-z]+)*)\s*$", re.MULTILINE)
# The package, the extras, and the versions of a requirement
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[([a-z,]+)\])?\s*([^;]*)")

Extras = tuple[str, ...]


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


def sets_in(text: str) -> set[Extras]:
    """Return the sets of extras in the installation commands of a text, each sorted.

    >>> sorted(sets_in("pip install '.[text]' or '.[engine,events]'"))
    [('engine', 'events'), ('text',)]
    """
    lists = (*_ARGUMENT.findall(text), *_VARIABLE.findall(text))
    return {tuple(sorted(names.split(","))) for names in lists}


def named_sets() -> list[Extras]:
    """Return every set of extras in the project's files. The first is empty, for a plain `pip install .`."""
    files = {file for pattern in (*_PAGES, *_DEPLOY) for file in ROOT.glob(pattern)}
    extras = project()["optional-dependencies"]
    candidates = {each for file in files for each in sets_in(file.read_text(encoding="utf-8"))}
    named = {each for each in candidates if set(each) <= set(extras)}  # other projects have extras too
    return sorted({(), *named}, key=lambda each: (len(each), each))


def closure(extras: Iterable[str]) -> set[str]:
    """Return extras together with those that they include: `cuda` includes `engine`."""
    tables = project()["optional-dependencies"]
    closed: set[str] = set()
    waiting = [*extras]
    while waiting:
        extra = waiting.pop()
        if extra not in closed:
            closed.add(extra)
            waiting += [name for requirement in tables[extra] for name in _own_extras(requirement)]
    return closed


def requirements(extras: Iterable[str]) -> list[str]:
    """Return the requirements of the package with some extras, without environment markers and radixkv itself."""
    table = project()
    listed = [
        *table["dependencies"],
        *(requirement for extra in closure(extras) for requirement in table["optional-dependencies"][extra]),
    ]
    return [requirement.partition(";")[0].strip() for requirement in listed if not _own_extras(requirement)]


def package_of(requirement: str) -> str:
    """Return the package name of a requirement.

    >>> package_of("redis[hiredis]>=6.4")
    'redis'
    """
    match = _REQUIREMENT.match(requirement)
    assert match is not None
    return match[1]


def oldest(requirements: Iterable[str]) -> list[str]:
    """Return constraints for the oldest version that each requirement allows.

    >>> oldest(["torch>=2.11,<2.14", "redis[hiredis]>=6.4", "smg==1.13.0"])
    ['torch==2.11', 'redis==6.4', 'smg==1.13.0']

    Raises:
        ValueError: a requirement has no lower bound.
    """
    constraints = []
    for requirement in requirements:
        bound = re.search(r"[>=]=\s*([0-9][0-9a-z.]*)", requirement)
        if bound is None:
            raise ValueError(f"{requirement}: a lower bound is required")
        constraints.append(f"{package_of(requirement)}=={bound[1]}")
    return constraints


def _own_extras(requirement: str) -> list[str]:
    """Return the extras of a requirement on radixkv itself, such as `radixkv[engine]`."""
    match = _REQUIREMENT.match(requirement)
    assert match is not None
    return match[2].split(",") if match[1] == "radixkv" and match[2] else []
