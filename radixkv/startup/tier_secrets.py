"""Reads the secrets of the stores below the device from the files that a configuration names.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from radixkv.config import TiersConfig
from radixkv.config.regular_file import read_named
from radixkv.errors import ConfigError
from radixkv.offload.block_keys import MAX_SECRET_BYTES, BlockFormat
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import Protection
from radixkv.offload.tiers.sealing import KEY_BYTES, TenantCiphers

# A shorter secret could be guessed, offline, from a block that it authenticates.
_MIN_SECRET_BYTES = 16


def secret_of(config: TiersConfig) -> bytes:
    """Return a digest of the secret in `secret_file`; empty without a file.

    Raises:
        ConfigError: the file can't be read, or has fewer than 16 bytes without the white space around them.
    """
    if config.secret_file is None:
        return b""
    secret = read_named("tiers.secret_file", config.secret_file).strip()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"tiers.secret_file: expected at least {_MIN_SECRET_BYTES} bytes, such as the output of "
            f"`openssl rand -hex 32`, got {len(secret)}"
        )
    return blake2b(secret, digest_size=MAX_SECRET_BYTES).digest()


def has_protection(config: TiersConfig) -> bool:
    """Return whether blocks outside the process are authenticated or encrypted, so that modified ones are not used."""
    return config.secret_file is not None or config.encryption_key_file is not None


def ciphers_of(config: TiersConfig) -> TenantCiphers | None:
    """Return the ciphers of the key in `encryption_key_file`; None without a file.

    Raises:
        ConfigError: the file can't be read or has no key, or a package is missing.
    """
    if config.encryption_key_file is None:
        return None
    text = read_named("tiers.encryption_key_file", config.encryption_key_file)
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError("tiers.encryption_key_file: expected 64 hexadecimal digits in the file, got something else")
    return TenantCiphers(key)


def mac_of(config: TiersConfig, block_format: BlockFormat) -> BlockMac | None:
    """Return the MAC that authenticates blocks with the secret in `secret_file`; None without a file.

    Raises:
        ConfigError: see `secret_of`.
    """
    secret = secret_of(config)
    return BlockMac(secret, block_format.fingerprint) if secret else None


def protection_of(config: TiersConfig, mac: BlockMac | None) -> Callable[[str], Protection | None]:
    """Return a function that returns the protection of a tenant's blocks outside the process.

    This is the tenant's cipher with `encryption_key_file`, and otherwise `mac`.

    Raises:
        ConfigError: see `ciphers_of`.
    """
    ciphers = ciphers_of(config)
    return (lambda tenant: mac) if ciphers is None else ciphers.of


def unprotected(tenant: str) -> None:
    """Return None: a tenant's blocks are neither encrypted nor authenticated, since only this process writes them."""
