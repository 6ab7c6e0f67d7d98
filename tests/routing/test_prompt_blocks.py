from __future__ import annotations

import numpy as np
import pytest

from radixkv.errors import InvalidRequest
from radixkv.events.block_identity import Identities, hash_blocks
from radixkv.namespace import Namespace
from radixkv.routing.prompt_blocks import PromptBlocks

KEY = bytes(range(32))
BASE = Namespace("m")


def tokens(count: int) -> bytes:
    return np.arange(count, dtype="<u4").tobytes()


def hashes(namespace: Namespace, prompt: bytes, key: bytes = KEY) -> list[int]:
    return PromptBlocks(namespace, prompt, 4, Identities("", key)).all()


def test_hashes_are_those_of_block_events() -> None:
    expected = np.frombuffer(hash_blocks(bytes(8), tokens(40), 16), "<u8").tolist()
    assert hashes(BASE, tokens(41)) == expected


def test_a_block_that_contains_the_last_token_is_not_hashed() -> None:
    assert [len(hashes(BASE, tokens(count))) for count in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_hashing_in_parts_gives_the_same() -> None:
    blocks = PromptBlocks(BASE, tokens(41), 4, Identities("", KEY))
    parts = [blocks.hash_next(3), blocks.hash_next(1), blocks.hash_next(100), blocks.hash_next()]
    assert [len(part) for part in parts] == [3, 1, 6, 0]
    assert blocks.are_all_hashed
    assert [each for part in parts for each in part] == blocks.hashes == hashes(BASE, tokens(41))


def test_no_two_namespaces_share_a_hash() -> None:
    namespaces = [
        BASE,
        Namespace("m", tenant="acme"),
        Namespace("m", tenant="acme", salt="x"),
        Namespace("m", salt="acme"),
        Namespace("m", adapter="acme"),
        Namespace("m2", tenant="acme"),
    ]
    all_hashes = [each for namespace in namespaces for each in hashes(namespace, tokens(41))]
    assert len(set(all_hashes)) == len(all_hashes) == 6 * 10, "ten blocks in each namespace"


def test_salted_hashes_need_the_key_of_the_replicas() -> None:
    salted = Namespace("m", salt="x")
    assert hashes(salted, tokens(9)) == hashes(salted, tokens(9))
    assert not set(hashes(salted, tokens(9))) & set(hashes(salted, tokens(9), bytes(32)))
    assert hashes(BASE, tokens(9)) == hashes(BASE, tokens(9), bytes(32))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        hashes(BASE, b"")
