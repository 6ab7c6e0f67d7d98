from __future__ import annotations

import sys

import pytest

from radixkv.errors import ConfigError
from radixkv.offload.tiers.block_mac import MAC_BYTES, MAC_SALT_BYTES, BlockMac

MAC = BlockMac(b"secret", "format")
SALT = bytes(range(MAC_SALT_BYTES))


def test_a_mac_depends_on_the_secret_the_format_the_salt_and_the_bytes() -> None:
    macs = [
        MAC.of(SALT, [b"data"]),
        MAC.of(SALT, [b"datb"]),
        MAC.of(bytes(MAC_SALT_BYTES), [b"data"]),
        BlockMac(b"secres", "format").of(SALT, [b"data"]),
        BlockMac(b"secret", "formas").of(SALT, [b"data"]),
    ]
    assert len(set(macs)) == len(macs)
    assert {len(mac) for mac in macs} == {MAC_BYTES}


def test_the_mac_of_several_parts_is_that_of_their_concatenation() -> None:
    expected = MAC.of(SALT, [b"some data"])
    assert MAC.of(SALT, [b"some", b"", memoryview(b" data")]) == expected
    assert MAC.is_of(expected, SALT, [b"some data"])
    assert not MAC.is_of(expected, SALT, [b"some dat"])
    assert not MAC.is_of(expected[:-1], SALT, [b"some data"])


def test_long_parts_are_authenticated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = MAC.of(SALT, [bytes(1000)])
    monkeypatch.setattr("radixkv.offload.tiers.block_mac._PIECE_BYTES", 37)
    assert MAC.of(SALT, [bytes(1000)]) == expected


def test_salts_differ() -> None:
    assert len({MAC.new_salt() for _ in range(100)}) == 100


def test_without_the_package_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"^tiers\.secret_file: the package cryptography is missing"):
        BlockMac(b"secret", "format")
