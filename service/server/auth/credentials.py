"""The credentials file: hashes of tokens and names of certificates, with the identity that each belongs to."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from radixkv.config.regular_file import read_named
from radixkv.errors import ConfigError
from radixkv.service.server.auth.identity import OPERATORS, Identity, Role

_KEYS = frozenset({"name", "role", "tenant", "tenants", "token_sha256", "certificate", "expires"})
_HEX_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Credential:
    """One entry of the file.

    Attributes:
        identity: the caller that the credential belongs to.
        token_sha256: SHA-256 of the token; None for a certificate.
        certificate: a URI, DNS name or common name of the certificate; None for a token.
        expires_at_s: Unix time at which the credential expires; None if it does not.
    """

    identity: Identity
    token_sha256: bytes | None
    certificate: str | None
    expires_at_s: float | None


class Credentials:
    """All credentials of a file. Immutable.

    Args:
        entries: the entries of the file, in its order.

    Raises:
        ConfigError: two entries have the same name, token or certificate.
    """

    def __init__(self, entries: Iterable[Credential]) -> None:
        self._by_hash: dict[bytes, Credential] = {}
        self._by_certificate: dict[str, Credential] = {}
        names: set[str] = set()
        for entry in entries:
            name = entry.identity.name
            is_unique = name not in names
            if entry.token_sha256 is not None:
                is_unique &= self._by_hash.setdefault(entry.token_sha256, entry) is entry
            if entry.certificate is not None:
                is_unique &= self._by_certificate.setdefault(entry.certificate, entry) is entry
            if not is_unique:
                raise ConfigError(
                    f"credentials {name!r}: another entry has the same name, token or certificate; each must be unique"
                )
            names.add(name)

    def of_token(self, token: str) -> Credential | None:
        """Return the entry of a token; None if there is none.

        The time that the lookup takes reveals nothing about valid tokens, because a caller cannot choose the hash of a
        token.
        """
        digest = hashlib.sha256(token.encode()).digest()
        entry = self._by_hash.get(digest)
        if entry is None or entry.token_sha256 is None or not hmac.compare_digest(entry.token_sha256, digest):
            return None
        return entry

    def of_certificate(self, names: Iterable[str]) -> Credential | None:
        """Return the entry that matches one of a certificate's names; None if no entry or several entries match."""
        matches = {id(entry): entry for name in names if (entry := self._by_certificate.get(name)) is not None}
        return next(iter(matches.values())) if len(matches) == 1 else None


def read_credentials(path: str | Path) -> Credentials:
    """Read a credentials file.

    Raises:
        ConfigError: the file cannot be read, or is invalid. The message names the entry and the key, and repeats no
            value except the name of the entry.
    """
    try:
        text = read_named("server.tokens_file", path).decode()
    except UnicodeDecodeError:
        raise ConfigError("server.tokens_file: the file is not UTF-8") from None
    return parse_credentials(text)


def parse_credentials(text: str) -> Credentials:
    """Parse credentials from TOML.

    Raises:
        ConfigError: as `read_credentials`.
    """
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the message may quote the file, so only the line number is repeated
        line = re.search(r"\(at (line \d+), column \d+\)$", str(error))
        place = "" if line is None else f" in {line[1]}"
        raise ConfigError(f"server.tokens_file: the file is not valid TOML{place}") from None
    entries = tree.get("credentials", [])
    if set(tree) - {"credentials"} or not isinstance(entries, list):
        raise ConfigError("server.tokens_file: the file may have only entries [[credentials]]")
    if not entries:  # for example while the file is being written
        raise ConfigError("server.tokens_file: the file has no entry [[credentials]]; at least one is required")
    return Credentials([_credential(index, entry) for index, entry in enumerate(entries, start=1)])


def _credential(index: int, entry: Any) -> Credential:
    if not isinstance(entry, dict):
        raise ConfigError(f"credentials, entry {index}: it must be a table [[credentials]]")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"credentials, entry {index}: `name` is missing")
    subject = f"credentials {name!r}"
    unknown_keys = sorted(set(entry) - _KEYS)
    if unknown_keys:
        raise ConfigError(f"{subject}: expected the keys {', '.join(sorted(_KEYS))}, got {', '.join(unknown_keys)}")
    if ("token_sha256" in entry) is ("certificate" in entry):
        raise ConfigError(f"{subject}: requires either token_sha256 or certificate, and not both")
    certificate = entry.get("certificate")
    if certificate is not None and not (isinstance(certificate, str) and certificate):
        raise ConfigError(f"{subject}: `certificate` must be a name in the certificate")
    role = _role(subject, entry)
    return Credential(
        Identity(name, role, _tenants(subject, role, entry)),
        _token_sha256(subject, entry["token_sha256"]) if "token_sha256" in entry else None,
        certificate,
        _expiry(subject, entry),
    )


def _role(subject: str, entry: Mapping[str, Any]) -> Role:
    try:
        return Role(entry.get("role", Role.TENANT.value))
    except ValueError:
        raise ConfigError(f"{subject}: `role` must be tenant, router, reader or admin") from None


def _tenants(subject: str, role: Role, entry: Mapping[str, Any]) -> frozenset[str] | None:
    tenant = entry.get("tenant")
    tenants = entry.get("tenants")
    if role is Role.TENANT:
        if not isinstance(tenant, str) or tenants is not None:
            raise ConfigError(f"{subject}: the role tenant requires `tenant`, the name of one tenant, and no `tenants`")
        return frozenset({tenant})
    if role in OPERATORS:
        if tenant is not None or tenants is not None:
            raise ConfigError(f"{subject}: the role {role.value} allows neither `tenant` nor `tenants`")
        return None if role is Role.ADMIN else frozenset()
    if tenant is not None or not (tenants == "all" or _is_list_of_names(tenants)):
        raise ConfigError(f'{subject}: the role router requires `tenants`, a list of names or "all", and no `tenant`')
    return None if tenants == "all" else frozenset(tenants or ())


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _token_sha256(subject: str, value: Any) -> bytes:
    if not isinstance(value, str) or len(value) != 64 or set(value) - _HEX_DIGITS:
        raise ConfigError(f"{subject}: `token_sha256` must have 64 hexadecimal digits, in lower case")
    return bytes.fromhex(value)


def _expiry(subject: str, entry: Mapping[str, Any]) -> float | None:
    expires = entry.get("expires")
    if expires is None:
        return None
    if not isinstance(expires, datetime):
        raise ConfigError(f"{subject}: `expires` must be a date and time, such as 2030-01-31T00:00:00Z")
    return (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp()
