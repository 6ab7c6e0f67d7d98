from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from radixkv.events.block_identity import Identities, hash_blocks
from radixkv.namespace import Namespace


def test_the_hash_of_a_block_covers_the_previous_hash_and_the_tokens() -> None:
    tokens = np.arange(40, dtype="<u4").tobytes()
    first = xxh3_64_intdigest(bytes(8) + tokens[:64])  # a block of 16 tokens
    second = xxh3_64_intdigest(first.to_bytes(8, "little") + tokens[64:128])
    assert np.frombuffer(hash_blocks(bytes(8), tokens, 64), "<u8").tolist() == [first, second]


def test_only_the_tenant_of_routers_without_adapter_and_salt_has_a_zero_root_and_no_cache_salt() -> None:
    identities = Identities("gateway")
    assert identities.of(Namespace("m", "gateway")) == (bytes(8), "")
    others = [Namespace("m"), Namespace("m", "gateway", "a"), Namespace("m", "gateway", "", "s"), Namespace("m", "x")]
    other_identities = [identities.of(namespace) for namespace in others]
    assert len({each.root for each in other_identities} | {bytes(8)}) == 5, "four others, and the zeros"
    assert len({each.cache_salt for each in other_identities} | {""}) == 5, "four others, and the empty one"


def test_namespaces_with_the_same_concatenated_fields_have_different_identities() -> None:
    identities = Identities()
    assert identities.of(Namespace("m", "a", "bc")) != identities.of(Namespace("m", "ab", "c"))


def test_identities_are_equal_with_the_same_key_and_differ_without_one() -> None:
    salted = Namespace("m", salt="s")
    assert Identities(key=b"k" * 16).of(salted) == Identities(key=b"k" * 16).of(salted)
    assert Identities().of(salted) != Identities().of(salted)
