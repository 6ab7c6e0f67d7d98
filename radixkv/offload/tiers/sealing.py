"""Encryption of objects at rest, with a key for each tenant."""

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
KEY_BYTES, _NONCE_BYTES = 32, 12
_PERSON, _TENANT_PERSON = b"radixkv seal 1", b"radixkv tenant 1"


class TenantCiphers:
    """Makes a cipher for each tenant, with a key of its own.

    Args:
        key: 32 secret bytes, from which the tenants' keys are derived.

    Raises:
        ConfigError: as `BlockCipher` does.
    """

    def __init__(self, key: bytes) -> None:
        BlockCipher(key)
        self._key = key
        self._of = lru_cache(maxsize=4096)(self._new)

    def of(self, tenant: str) -> BlockCipher:
        """Return the cipher of a tenant."""
        return self._of(tenant)

    def _new(self, tenant: str) -> BlockCipher:
        data = tenant.encode("utf-8", "surrogatepass")
        return BlockCipher(blake2b(data, digest_size=KEY_BYTES, key=self._key, person=_TENANT_PERSON).digest())


class NotSealedByUs(Exception):
    """These bytes were not encrypted with this key, or were changed since."""


class BlockCipher:
    """Seals the objects of one tenant: AES-256-GCM, which also finds any change.

    Each object has a key and a nonce of its own, derived from the tenant's key and 192 random bits. They repeat if
    these bits do, which 2^80 objects don't make likely; 2^32 objects are too many for random nonces under one key.

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
        """Return random bytes for one object."""
        return os.urandom(SALT_BYTES)

    def seal(self, salt: bytes, head: bytes, tokens: bytes, payload: memoryview) -> bytes:
        """Encrypt tokens and payload of one object, and bind them to its head.

        Args:
            salt: of `new_salt`, for this object alone.
            head: the object's head, which stays readable.
            tokens: the block's tokens.
            payload: K and V.
        """
        gcm, nonce = self._once(salt)
        return gcm.encrypt(nonce, b"".join((tokens, payload)), head)

    def open(self, salt: bytes, head: memoryview, sealed: memoryview) -> bytes:
        """Decrypt what `seal` returned.

        Raises:
            NotSealedByUs: it is of another key, or it or the head was changed.
        """
        from cryptography.exceptions import InvalidTag

        gcm, nonce = self._once(salt)
        try:
            return gcm.decrypt(nonce, sealed, head)
        except InvalidTag as error:
            raise NotSealedByUs("object: expected one sealed with this key, got another") from error

    def _once(self, salt: bytes) -> tuple[AESGCM, bytes]:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        derived = blake2b(salt, digest_size=KEY_BYTES + _NONCE_BYTES, key=self._key, person=_PERSON).digest()
        return AESGCM(derived[:KEY_BYTES]), derived[KEY_BYTES:]
