"""An initializer sets each attribute once, so that no attribute has two meanings."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from .house import modules


def attributes_set_twice(source: str) -> Iterator[str]:
    """Yield the attributes that an initializer sets more than once, outside of branches, as `Class.attribute`."""
    for definition in ast.walk(ast.parse(source)):
        if not isinstance(definition, ast.ClassDef):
            continue
        for method in definition.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                counts = Counter(
                    node.attr
                    for statement in method.body
                    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
                    for node in ast.walk(statement)
                    if isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                )
                yield from (f"{definition.name}.{name}" for name, count in counts.items() if count > 1)


def test_no_initializer_sets_an_attribute_twice() -> None:
    attributes_by_module = {
        name: list(attributes_set_twice(path.read_text(encoding="utf-8"))) for name, path in modules().items()
    }
    assert {name: attributes for name, attributes in attributes_by_module.items() if attributes} == {}


def test_an_attribute_that_is_set_twice_is_detected() -> None:
    source = """
class Table:
    def __init__(self, max_keys: int) -> None:
        self.size: int
        self.max_keys, self.size = max_keys, 0
        if max_keys:
            self.size = 1
        self.max_keys: int = 0
"""
    assert list(attributes_set_twice(source)) == ["Table.max_keys"]
