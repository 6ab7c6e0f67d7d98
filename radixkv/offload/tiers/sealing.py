"""Encryption of objects at rest, with a key per tenant."""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError

if TYPE_CHECKING:  # the package is an extra
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SALT_BYTES = 24
TAG_BYTES = 16
KEY_BYTES = 32
_NONCE_BYTES = 12
_PERSON = b"radixkv seal 1"
_TENANT_PERSON = b"radixkv tenant 1"


class TenantCiphers:
    """Derives a cipher with its own key for each tenant.

    Args:
        key: 32 secret bytes, from which the keys of the tenants are derived.

    Raises:
        ConfigError: as in `BlockCipher`.
    """

    def __init__(self, key: bytes) -> None:
        BlockCipher(key)  # checks the key and the package
        self._key = key
        self._of = lru_cache(maxsize=4096)(self._new_cipher)

    def of(self, tenant: str) -> BlockCipher:
        """Return the cipher of a tenant."""
        return self._of(tenant)

    def _new_cipher(self, tenant: str) -> BlockCipher:
        name = tenant.encode("utf-8", "surrogatepass")
        return BlockCipher(blake2b(name, digest_size=KEY_BYTES, key=self._key, person=_TENANT_PERSON).digest())


class NotSealedByUs(Exception):
    """The bytes were not encrypted with this key, or were modified afterwards."""


class BlockCipher:
    """Encrypts the objects of one tenant with AES-256-GCM, which also detects any modification.

    Each object has its own key and nonce, derived from the key of the tenant and 192 random bits, whose collision is
    unlikely up to 2^80 objects. With one key and random nonces, the limit would be 2^32 objects.

    Args:
        key: 32 secret bytes.

    Raises:
        ConfigError: the key has another length, or the package `cryptography` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"key of a tenant's objects: expected {KEY_BYTES} bytes, got {len(key)}")
        require_package("tiers.encryption_key_file", "cryptography", "cryptography", "encryption")
        self._key = key

    def new_salt(self) -> bytes:
        """Return the random bytes for one object."""
        return os.urandom(SALT_BYTES)

    def seal(self, salt: bytes, head: bytes, tokens: bytes, payload: memoryview) -> bytes:
        """Encrypt the tokens and the payload of an object, and authenticate its head.

        Args:
            salt: from `new_salt`, for this object only.
            head: the head of the object, which is not encrypted.
            tokens: tokens of the block.
            payload: K and V.
        """
        gcm, nonce = self._cipher_and_nonce(salt)
        return gcm.encrypt(nonce, b"".join((tokens, payload)), head)

    def open(self, salt: bytes, head: memoryview, sealed: memoryview) -> bytes:
        """Decrypt the result of `seal`.

        Raises:
            NotSealedByUs: it was encrypted with another key, or it or the head was modified.
        """
        from cryptography.exceptions import InvalidTag

        gcm, nonce = self._cipher_and_nonce(salt)
        try:
            return gcm.decrypt(nonce, sealed, head)
        except InvalidTag as error:
            raise NotSealedByUs("object: expected one that was encrypted with this key, got another") from error

    def _cipher_and_nonce(self, salt: bytes) -> tuple[AESGCM, bytes]:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        derived = blake2b(salt, digest_size=KEY_BYTES + _NONCE_BYTES, key=self._key, person=_PERSON).digest()
        return AESGCM(derived[:KEY_BYTES]), derived[KEY_BYTES:]
