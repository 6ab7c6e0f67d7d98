from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from radixkv.events.block_identity import Identities, hash_blocks
from radixkv.namespace import Namespace


def test_a_hash_is_that_of_the_hash_before_and_of_the_tokens() -> None:
    tokens = np.arange(40, dtype="<u4").tobytes()
    first = xxh3_64_intdigest(bytes(8) + tokens[:64])
    second = xxh3_64_intdigest(first.to_bytes(8, "little") + tokens[64:128])
    assert np.frombuffer(hash_blocks(bytes(8), tokens, 64), "<u8").tolist() == [first, second]


def test_the_tenant_of_routers_begins_with_zeros_and_has_no_salt() -> None:
    identities = Identities("gateway")
    assert identities.of(Namespace("m", "gateway")) == (bytes(8), "")
    others = [Namespace("m"), Namespace("m", "gateway", "a"), Namespace("m", "gateway", "", "s"), Namespace("m", "x")]
    found = [identities.of(namespace) for namespace in others]
    assert len({each.root for each in found} | {bytes(8)}) == 5
    assert len({each.cache_salt for each in found} | {""}) == 5


def test_fields_are_not_joined() -> None:
    identities = Identities()
    assert identities.of(Namespace("m", "a", "bc")) != identities.of(Namespace("m", "ab", "c"))


def test_names_depend_on_the_key_alone() -> None:
    salted = Namespace("m", salt="s")
    assert Identities(key=b"k" * 16).of(salted) == Identities(key=b"k" * 16).of(salted)
    assert Identities().of(salted) != Identities().of(salted)
