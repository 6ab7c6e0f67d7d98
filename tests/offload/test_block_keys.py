from __future__ import annotations

import dataclasses
import re

import pytest

from radixkv.errors import ConfigError, InvariantViolation
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.offload.block_keys import BlockKeys

from .tiers.blocks import FORMAT, KEYS, tokens_of

NAMESPACE = Namespace("model", "alice", "adapter", "salt")


@pytest.mark.parametrize("field", dataclasses.fields(FORMAT), ids=lambda field: field.name)
def test_each_field_of_a_format_makes_other_keys(field: dataclasses.Field[object]) -> None:
    value = getattr(FORMAT, field.name)
    other = dataclasses.replace(FORMAT, **{field.name: value + 1 if isinstance(value, int) else f"{value}x"})
    assert other.fingerprint != FORMAT.fingerprint
    assert BlockKeys(other, b"secret").root(NAMESPACE) != KEYS.root(NAMESPACE)


@pytest.mark.parametrize("field", ["model", "tenant", "adapter", "salt"])
def test_each_field_of_a_namespace_makes_other_keys(field: str) -> None:
    assert KEYS.root(NAMESPACE._replace(**{field: "other"})) != KEYS.root(NAMESPACE)


def test_namespaces_with_the_same_concatenated_fields_have_different_keys() -> None:
    assert KEYS.root(Namespace("m", "a", "bc")) != KEYS.root(Namespace("m", "ab", "c"))
    assert KEYS.root(Namespace("m", "", "a")) != KEYS.root(Namespace("m", "a", ""))


def test_a_key_depends_on_the_parent_and_on_the_tokens() -> None:
    root = KEYS.root(NAMESPACE)
    second = KEYS.child(KEYS.child(root, tokens_of(1)), tokens_of(2))
    assert second not in (KEYS.child(root, tokens_of(2)), KEYS.child(KEYS.child(root, tokens_of(3)), tokens_of(2)))


def test_an_incomplete_block_has_a_key_of_its_own() -> None:
    assert KEYS.child(bytes(32), tokens_of(1)[:-4]) != KEYS.child(bytes(32), tokens_of(1))


def test_a_scope_has_the_keys_of_the_namespaces_with_its_names() -> None:
    def is_in_scope(namespace: Namespace, *names: str | None) -> bool:
        """Return whether the scope of a tenant, an adapter and a salt (None means any) has the namespace."""
        key = KEYS.child(KEYS.root(namespace), tokens_of(1))
        scope = KEYS.scope(*names)
        is_matched = re.match(scope.hex_pattern("."), key.hex()) is not None
        assert scope.has(key) is is_matched
        return is_matched

    for names in (("alice", "adapter", "salt"), (None, None, None), (None, "adapter", None), (None, None, "salt")):
        assert is_in_scope(NAMESPACE, *names)
    for names in (("bob", None, None), (None, "", None), (None, None, "s"), ("alice", "adapter", "")):
        assert not is_in_scope(NAMESPACE, *names)
    assert not is_in_scope(Namespace("model", PUBLIC_TENANT, salt="1"), None, None, None), "it is a public prefix"


def test_keys_of_blocks_that_an_invoked_adapter_computes_begin_with_its_tag() -> None:
    base = NAMESPACE._replace(adapter="")
    invoked = NAMESPACE
    parent = KEYS.child(KEYS.root(base), tokens_of(1))
    key = KEYS.child(KEYS.with_tags_of(parent, invoked), tokens_of(2))
    assert KEYS.tags_of(key) == KEYS.tags_of(KEYS.root(invoked)) != KEYS.tags_of(parent)
    num_tag_bytes = len(KEYS.tags_of(key))
    assert key[num_tag_bytes:] != KEYS.child(KEYS.root(invoked), tokens_of(2))[num_tag_bytes:]


def test_another_secret_makes_other_keys() -> None:
    assert BlockKeys(FORMAT, b"other").root(NAMESPACE) != KEYS.root(NAMESPACE) != BlockKeys(FORMAT).root(NAMESPACE)


def test_keys_are_stable() -> None:
    """A change of these keys makes the contents of all shared and persistent stores useless."""
    key = KEYS.child(KEYS.root(NAMESPACE), tokens_of(1))
    assert key.hex() == "a87496d0d5617f08bb54197f046c6f3c57266d71bac4a6cba156ea42cfe8dcdb"


def test_a_public_prefix_is_identified_by_its_tokens_and_not_by_its_serial() -> None:
    prefix_tokens = tokens_of(1)
    first = NAMESPACE._replace(public_prefix="1:16")
    again = NAMESPACE._replace(public_prefix="7:16")
    assert KEYS.root(first, prefix_tokens) == KEYS.root(again, prefix_tokens) != KEYS.root(first, tokens_of(2))
    assert KEYS.root(first, prefix_tokens) != KEYS.root(NAMESPACE)
    assert KEYS.root(Namespace("m", PUBLIC_TENANT, salt="1")) == KEYS.root(Namespace("m", PUBLIC_TENANT, salt="7"))


def test_a_public_prefix_of_another_length_is_refused() -> None:
    with pytest.raises(InvariantViolation, match="public prefix: expected 16 tokens, got 60 bytes"):
        KEYS.root(NAMESPACE._replace(public_prefix="1:16"), tokens_of(1)[:-4])


def test_a_long_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at most 64 bytes, got 65"):
        BlockKeys(FORMAT, bytes(65))
