"""The examples in docstrings are correct."""

from __future__ import annotations

import doctest
import importlib

import pytest

from .house import modules

MODULES = [name for name, path in modules().items() if ">>>" in path.read_text(encoding="utf-8")]


def test_examples_of_the_cache_and_of_the_service_are_found() -> None:
    assert {"radixkv.cache.prefix_cache", "radixkv.service.token_ids"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_correct(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
