"""Message authentication codes (MACs) of objects that other processes can write."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from hashlib import blake2b

from radixkv.config.needed_package import require_package

MAC_SALT_BYTES = 16
MAC_BYTES = 16
_KEY_BYTES = 32
_NONCE_BYTES = 12
_PERSON = b"radixkv mac 1"
_OBJECT_PERSON = b"radixkv mac of 1"
# An update of more than 2 GiB would overflow OpenSSL's length.
_PIECE_BYTES = 1 << 30


class BlockMac:
    """Authenticates the objects of one block format with AES-256-GMAC.

    Each object has its own key and nonce, derived from the secret, the format and 128 random bits, whose collision is
    unlikely up to 2^60 objects. GMAC takes about as long as a copy of the bytes; HMAC-SHA256 takes five times and
    BLAKE2b ten times as long (docs/LOG.md).

    Args:
        secret: shared by all servers that may write the objects.
        fingerprint: `BlockFormat.fingerprint`: model, dtypes, layout, block size and kernels.

    Raises:
        ConfigError: the package `cryptography` is not installed.
    """

    def __init__(self, secret: bytes, fingerprint: str) -> None:
        require_package("tiers.secret_file", "cryptography", "cryptography", "encryption")
        key = blake2b(secret, digest_size=_KEY_BYTES, person=_PERSON).digest()
        self._key = blake2b(fingerprint.encode(), digest_size=_KEY_BYTES, key=key, person=_PERSON).digest()

    def new_salt(self) -> bytes:
        """Return the random bytes for one object."""
        return os.urandom(MAC_SALT_BYTES)

    def of(self, salt: bytes, parts: Iterable[bytes | memoryview]) -> bytes:
        """Return the MAC of the concatenated parts, 16 bytes. Releases the GIL during the pass over each part.

        Args:
            salt: from `new_salt`, for this object only.
            parts: the bytes of the object.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        size = _KEY_BYTES + _NONCE_BYTES
        derived = blake2b(salt, digest_size=size, key=self._key, person=_OBJECT_PERSON).digest()
        gcm = Cipher(AES(derived[:_KEY_BYTES]), GCM(derived[_KEY_BYTES:])).encryptor()
        for part in parts:
            for start in range(0, len(part), _PIECE_BYTES):
                gcm.authenticate_additional_data(part[start : start + _PIECE_BYTES])
        gcm.finalize()
        return gcm.tag

    def is_of(self, tag: bytes, salt: bytes, parts: Iterable[bytes | memoryview]) -> bool:
        """Return whether a MAC is that of the parts, in constant time."""
        return hmac.compare_digest(tag, self.of(salt, parts))
