from __future__ import annotations

import pytest

from radixkv.namespace import Namespace

FIELDS = Namespace._fields


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_part_of_the_identity(field: str) -> None:
    namespace = Namespace("a", "b", "c", "d")
    other = namespace._replace(**{field: "x"})
    assert other != namespace
    assert other.seed != namespace.seed
    assert Namespace("a", "b", "c", "d") == namespace
    assert Namespace("a", "b", "c", "d").seed == namespace.seed


def test_fields_are_never_joined() -> None:
    shifted = [
        Namespace("a", "bc"),
        Namespace("ab", "c"),
        Namespace("abc"),
        Namespace("", "abc"),
        Namespace("a", "", "bc"),
        Namespace("a", "b", "c"),
        Namespace("a", "b", "", "c"),
    ]
    assert len(set(shifted)) == len(shifted)
    assert len({namespace.seed for namespace in shifted}) == len(shifted)


def test_length_prefixes_keep_separators_in_names_apart() -> None:
    assert Namespace("a\0", "b").seed != Namespace("a", "\0b").seed


def test_any_python_string_has_a_seed() -> None:
    assert Namespace("\ud800").seed != Namespace("\ud801").seed


def test_a_namespace_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Namespace("a").model = "b"  # type: ignore[misc]
