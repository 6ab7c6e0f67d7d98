from __future__ import annotations

import random

import pytest

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.events.block_identity import Identities
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.service.server.opaque_ids import NamespaceIds
from tests.fakes import publish, spell

FIELDS = Namespace._fields
_DIGEST = "5d1e6c0ffee"
# Names that a careless key would join, cut, fold or normalize into each other, and one digest in every role.
_NASTY = (
    *("", "a", "A", "aa", " ", "\0", "a\0", "\0a", ",", "a,b", "'a', 'b'", "é", "e\u0301", "\udc80", "\ud800\udc80"),
    *(_DIGEST, f"{_DIGEST}@3", f"{_DIGEST}@", "@3", PUBLIC_TENANT, PUBLIC_TENANT.upper(), f"{PUBLIC_TENANT} "),
    *("1", "1:", ":4", "1:4", "11:4", "1:44", "1:4:", "\x01" + 7 * "\0" + "a", 7 * "\0"),
)


def _fuzzed(seed: int, num_namespaces: int) -> list[Namespace]:
    """Make triples of namespaces: one with nasty names, one with two of its names swapped, one with the two joined."""
    rng, namespaces = random.Random(seed), []
    for _ in range(num_namespaces // 3):
        fields = [rng.choice(_NASTY) for _ in FIELDS]
        first, second = rng.sample(range(len(FIELDS)), 2)
        swapped, joined = list(fields), list(fields)
        swapped[first], swapped[second] = fields[second], fields[first]
        joined[first], joined[second] = "", fields[first] + fields[second]
        namespaces += [Namespace(*fields), Namespace(*swapped), Namespace(*joined)]
    return namespaces


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


@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_namespaces_never_share_an_identifier(seed: int) -> None:
    fuzzed = _fuzzed(seed, 6_000)
    different = {tuple(each) for each in fuzzed}
    assert len(set(fuzzed)) == len(different) > 5_000
    assert len({each.seed for each in fuzzed}) == len(different)
    opaque_ids = NamespaceIds()
    assert len({opaque_ids.of(each) for each in fuzzed}) == len(different)
    # In one process, all namespaces have the same model. Chance does not produce tenant a's own namespace.
    of_one_model = {each._replace(model="model") for each in fuzzed} | {Namespace("model", "a")}
    identities = Identities(tenant="a")
    identity_of = {each: identities.of(each) for each in of_one_model}
    assert len({identity.root for identity in identity_of.values()}) == len(of_one_model)
    assert len({identity.cache_salt for identity in identity_of.values()}) == len(of_one_model)
    # Only tenant a's namespace without adapter, salt and public prefix can be matched by tokens alone.
    without_salt = {namespace for namespace, identity in identity_of.items() if not identity.cache_salt}
    assert without_salt == {Namespace("model", "a")}


def test_tokens_cached_under_fuzzed_fields_are_found_under_no_others() -> None:
    namespaces = list(dict.fromkeys(_fuzzed(7, 900)))
    cache = PrefixCache(2 * len(namespaces), 4)
    for namespace in namespaces[::3]:
        publish(cache, "abcdef", namespace)
    cached_tokens = [cache.match(each, spell("abcdefgh")).cached_tokens for each in namespaces]
    assert cached_tokens == [0 if index % 3 else len("abcdef") for index in range(len(namespaces))]
    cache.check()


@pytest.mark.parametrize("name", _NASTY)
def test_no_name_that_a_client_sends_selects_a_public_prefix(name: str) -> None:
    namespace = Namespace("model", PUBLIC_TENANT, name, name)
    assert not namespace.is_among(None, None, None)
    assert not namespace.is_among(PUBLIC_TENANT, name, name)
    assert Namespace("model", name).is_among(name, None, None) == (name != PUBLIC_TENANT)
