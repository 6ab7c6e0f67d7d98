"""Authentication: who makes a call, from its metadata and the certificate of its connection."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Protocol

from radixkv.errors import InvalidCredential
from radixkv.service.server.auth.credentials import Credential, Credentials
from radixkv.service.server.auth.identity import Identity
from radixkv.service.server.auth.reloaded_files import ReloadedFiles
from radixkv.service.server.calls import Context

HEADER = "authorization"

_BEARER_PREFIX = "bearer "
# Properties of gRPC's auth context with names from the certificate of the client.
_NAME_PROPERTIES = ("peer_uri", "peer_dns", "x509_common_name")


class Authenticator(Protocol):
    """Identifies the callers of a server."""

    def identify_call(self, context: Context) -> Identity:
        """Return who makes a gRPC call.

        Raises:
            InvalidCredential: the call shows no valid credential.
        """
        ...

    def identify_header(self, authorization: str | None) -> Identity:
        """Return who sends the header `authorization` over HTTP. None means that there is no such header.

        Raises:
            InvalidCredential: the header has no valid credential.
        """
        ...


class AnonymousAuthenticator:
    """Gives every caller the same identity, for servers without credentials.

    Args:
        identity: the identity of every caller.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def identify_call(self, context: Context) -> Identity:
        """Return the identity of every caller."""
        return self._identity

    def identify_header(self, authorization: str | None) -> Identity:
        """Return the identity of every caller."""
        return self._identity


class CredentialAuthenticator:
    """Identifies callers by a bearer token if there is one, and otherwise, over gRPC, by a certificate.

    Args:
        credentials: the valid credentials.
        has_certificates: whether gRPC asks for and verifies certificates of clients.
        unix_time_s: returns the current Unix time, with which the expiry of credentials is compared.
    """

    def __init__(
        self,
        credentials: ReloadedFiles[Credentials],
        *,
        has_certificates: bool,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        if has_certificates:  # takes 80 ms, which the first call should not wait for
            import cryptography.x509  # noqa: F401
        self._credentials = credentials
        self._has_certificates = has_certificates
        self._unix_time_s = unix_time_s

    def identify_call(self, context: Context) -> Identity:
        """Return who makes a gRPC call; see `Authenticator`. Takes microseconds."""
        headers = [value for name, value in context.invocation_metadata() or () if name == HEADER]
        if headers or not self._has_certificates:
            return self._identify_token(headers)
        auth_properties = context.auth_context()
        for pem in auth_properties.get("x509_pem_cert", ()):  # TLS checks the expiry only when a connection begins
            try:
                expires_at_s = expiry_of(pem)
            except ValueError:  # TLS has accepted it, but cryptography cannot parse it
                raise InvalidCredential("certificate: its time of expiry cannot be read; use another one") from None
            if self._unix_time_s() >= expires_at_s:
                raise InvalidCredential("certificate: it has expired; reconnect with a new one")
        credential = self._credentials.get().of_certificate(_names_in_certificate(auth_properties))
        return self._require_valid(credential, "certificate: its names match no credential of this service, or several")

    def identify_header(self, authorization: str | None) -> Identity:
        """Return who sends a header; see `Authenticator`."""
        return self._identify_token([] if authorization is None else [authorization])

    def _identify_token(self, headers: list[str | bytes]) -> Identity:
        """Return the caller whose token is in the only header `authorization` of a call."""
        if len(headers) != 1:
            raise InvalidCredential(f"{HEADER}: expected one bearer token, got {len(headers) or 'none'}")
        header = str(headers[0])
        if header[: len(_BEARER_PREFIX)].lower() != _BEARER_PREFIX:
            raise InvalidCredential(f"{HEADER}: the header must be `Bearer TOKEN`")
        credential = self._credentials.get().of_token(header[len(_BEARER_PREFIX) :].strip())
        return self._require_valid(credential, f"{HEADER}: this service does not know the token")

    def _require_valid(self, credential: Credential | None, refusal: str) -> Identity:
        """Return the identity of a credential that is known and has not expired; `refusal` says why it is unknown."""
        if credential is None:
            raise InvalidCredential(refusal)
        if credential.expires_at_s is not None and self._unix_time_s() >= credential.expires_at_s:
            raise InvalidCredential("credential: it has expired; ask the operator for a new one")
        return credential.identity


def _names_in_certificate(auth_properties: Mapping[str, Iterable[bytes]]) -> Iterable[str]:
    for property_name in _NAME_PROPERTIES:
        for name in auth_properties.get(property_name, ()):
            yield name.decode(errors="replace")


def has_token(authorization: str, token: str) -> bool:
    """Return whether a header `authorization` has this bearer token, in a time that reveals nothing about the token."""
    return hmac.compare_digest(authorization.encode("utf-8", "surrogatepass"), f"Bearer {token}".encode())


@lru_cache(maxsize=1024)
def expiry_of(pem: bytes) -> float:
    """Return the Unix time after which a certificate is not valid.

    Args:
        pem: a certificate, PEM.

    Raises:
        ValueError: `pem` is not a certificate, or one that cannot be parsed.
    """
    from cryptography.x509 import InvalidVersion, load_pem_x509_certificate  # part of the extra `engine`

    try:
        return load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    except InvalidVersion as error:  # a certificate of version 2, which cryptography does not parse
        raise ValueError(str(error)) from error
