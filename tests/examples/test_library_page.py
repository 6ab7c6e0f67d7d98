"""The examples of docs/LIBRARY.md print what the page says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "LIBRARY.md"
MAX_TOY_LINES = 40


def test_the_examples_of_the_page_are_correct() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 15
    assert results.failed == 0


def test_the_example_of_the_cache_alone_is_short_and_needs_no_torch() -> None:
    *_, example = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert "class ToyEngine" in example
    assert len(example.splitlines()) <= MAX_TOY_LINES
    modules = set(re.findall(r"^>>> (?:from|import) (\S+)", example, re.MULTILINE))
    assert modules == {"numpy", "radixkv.cache.prefix_cache", "radixkv.namespace"}, "packages without torch"
