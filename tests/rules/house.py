"""Reads the imports of every module, as they are written, for the rules of `test_house.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Made by `make proto`.
GENERATED = ("radixkv.v1", "radixkv.gateway")
_FOLDERS = {"kernels": "radixkv.kernels", "radixkv": "radixkv", "service": "radixkv.service"}


def is_generated(name: str) -> bool:
    """Whether a module, or a package, is generated code."""
    return any(f"{name}.".startswith(f"{package}.") for package in GENERATED)


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by the name it is imported under. kernels/ and service/ are mapped into radixkv."""
    found = {}
    for folder, package in {**_FOLDERS, "bench": "bench"}.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imports(source: str, package: str) -> Iterator[str]:
    """The dotted names that a module imports, made absolute: at its top, inside functions and for type checkers.

    `from a import b` gives both `a` and `a.b`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str:
    """The package that a module's relative imports start from."""
    return name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]


@cache
def imported_names(name: str) -> frozenset[str]:
    """All dotted names that one of our modules imports."""
    return frozenset(imports(modules()[name].read_text(encoding="utf-8"), package_of(name)))


@cache
def imported_modules(name: str) -> frozenset[str]:
    """Return our own modules that a module imports, by their full names."""
    return frozenset(each for each in imported_names(name) if each in modules() and each != name)


def reachable(names: set[str]) -> set[str]:
    """Modules of ours that are loaded when these are imported, themselves and the packages above them among them."""
    seen: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in seen or name not in modules():
            continue
        seen.add(name)
        left += [name.rpartition(".")[0], *imported_modules(name)]
    return seen
