from __future__ import annotations

import sys

import pytest
from xxhash import xxh3_128

from radixkv.errors import ConfigError
from radixkv.offload.tiers.block_object import CHECKSUM_BYTES, HEAD_BYTES, ObjectFault, open_object
from radixkv.offload.tiers.sealing import BlockCipher, NotSealedByUs, TenantCiphers

from .blocks import PAYLOAD_BYTES, object_of, payload_of, tokens_of, wanted

CIPHER = BlockCipher(bytes(range(32)))


def test_tokens_and_payload_of_a_sealed_object_are_not_readable() -> None:
    data = object_of(1, 0, CIPHER)
    assert tokens_of(1)[:8] not in data
    assert payload_of(1)[:8] not in data


def test_the_same_block_is_sealed_differently_each_time() -> None:
    assert len({object_of(1, 0, CIPHER)[HEAD_BYTES:] for _ in range(100)}) == 100


def test_a_modified_head_is_detected() -> None:
    """An attacker with write access raises the generation of an object, and computes a new checksum."""
    data = bytearray(object_of(1, 4, CIPHER))
    data[24] = 9  # the generation in the head
    data[-CHECKSUM_BYTES:] = xxh3_128(data[:-CHECKSUM_BYTES]).digest()
    assert open_object(memoryview(data), wanted(1, CIPHER), PAYLOAD_BYTES) is ObjectFault.UNSEALED


def test_another_key_opens_nothing() -> None:
    salt = CIPHER.new_salt()
    sealed = CIPHER.seal(salt, b"head", b"tokens", memoryview(b"payload"))
    assert CIPHER.open(salt, memoryview(b"head"), memoryview(sealed)) == b"tokenspayload"
    with pytest.raises(NotSealedByUs):
        BlockCipher(bytes(32)).open(salt, memoryview(b"head"), memoryview(sealed))
    with pytest.raises(NotSealedByUs):
        CIPHER.open(CIPHER.new_salt(), memoryview(b"head"), memoryview(sealed))


def test_a_key_has_32_bytes() -> None:
    with pytest.raises(ConfigError, match="expected 32 bytes, got 16"):
        BlockCipher(bytes(16))


def test_without_the_package_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(
        ConfigError, match=r"^tiers\.encryption_key_file: the package cryptography is missing; .*\[encryption\]"
    ):
        BlockCipher(bytes(32))


def test_each_tenant_has_a_key_of_its_own() -> None:
    ciphers = TenantCiphers(bytes(32))
    salt = bytes(24)
    sealed = {ciphers.of(tenant).seal(salt, b"", b"", memoryview(b"payload")) for tenant in ("", "a", "b")}
    assert len(sealed) == 3
    sealed_again = TenantCiphers(bytes(32)).of("a").seal(salt, b"", b"", memoryview(b"payload"))
    assert sealed_again in sealed
    with pytest.raises(ConfigError, match="expected 32 bytes, got 31"):
        TenantCiphers(bytes(31))
