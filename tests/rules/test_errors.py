from __future__ import annotations

import re

import pytest

from radixkv import errors
from radixkv.errors import CapacityError, RadixKVError


def subclasses(kind: type[RadixKVError]) -> list[type[RadixKVError]]:
    """Return the direct and indirect subclasses of a class."""
    return [each for child in kind.__subclasses__() for each in (child, *subclasses(child))]


def test_the_module_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    parent_by_name, path = {}, ["RadixKVError"]
    for bars, name in re.findall(r"^    ([│├└─ ]+)(\w+)", errors.__doc__, re.MULTILINE):
        depth = len(bars) // 4  # the drawing is indented by four characters per level
        path = [*path[:depth], name]
        parent_by_name[name] = path[depth - 1]
    defined_here = [each for each in subclasses(RadixKVError) if each.__module__ == errors.__name__]
    assert parent_by_name == {kind.__name__: kind.__base__.__name__ for kind in defined_here}


def test_every_error_has_a_docstring() -> None:
    assert [kind.__name__ for kind in subclasses(RadixKVError) if not kind.__doc__] == []


@pytest.mark.parametrize("kind", subclasses(CapacityError), ids=lambda kind: kind.__name__)
def test_capacity_errors_have_a_retry_delay(kind: type[CapacityError]) -> None:
    assert kind("full").retry_after_s == 1.0
    error = kind("full", retry_after_s=0.25)
    assert error.retry_after_s == 0.25
    assert str(error) == "full"
