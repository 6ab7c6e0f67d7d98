"""English that is read once: numbers have names, and docstrings begin with a noun or a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from .house import GENERATED, ROOT

FOLDERS = ("radixkv", "kernels", "service", "bench", "tests")
GENERATED_FOLDERS = [ROOT.joinpath(*package.split(".")) for package in GENERATED]
RIDDLES = re.compile(r"\bso (?:many|much|often)\b", re.IGNORECASE)
NO_SUBJECT = re.compile(r"(?:Who|Whom|Whose|What|Which|Those|That|How|When|Where)\b")
BANNER = re.compile(r"^\s*# *[-=]{2,}.*$", re.MULTILINE)
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not set(path.parents) & set(GENERATED_FOLDERS)
)
DOCUMENTS = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "build"} & set(path.relative_to(ROOT).parts))


def riddles(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if RIDDLES.search(line)]


def docstrings_without_subject(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text.partition("\n")[0] for text in found if NO_SUBJECT.match(text)]


def found_in(paths: Iterable[Path], rule: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what a rule finds, by file; files in which it finds nothing are left out."""
    found = {str(path.relative_to(ROOT)): rule(path.read_text(encoding="utf-8")) for path in paths}
    return {path: lines for path, lines in found.items() if lines}


def test_a_number_is_named() -> None:
    assert found_in([*SOURCES, *DOCUMENTS], riddles) == {}


def test_a_docstring_begins_with_a_noun_or_a_verb() -> None:
    assert found_in(SOURCES, docstrings_without_subject) == {}


def test_no_comment_is_a_banner() -> None:
    """A file that needs banners is two files."""
    assert found_in(SOURCES, BANNER.findall) == {}


def test_the_rule_sees_what_it_forbids() -> None:
    riddle = "Give at most so" + " many tokens."
    assert riddles(f"{riddle}\nGive at most `turn` tokens.") == [riddle]
    assert docstrings_without_subject('"""What is lost."""') == ["What is lost."]
    assert docstrings_without_subject('def f():\n    """Whatever is lost, return it."""') == []
    assert BANNER.findall("x = 1  # ---\n    # -- dice ----\n# a -- b") == ["    # -- dice ----"]
