"""Finds out who calls, from the metadata of a call and the certificate of its connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from radixkv.errors import InvalidCredential
from radixkv.service.server.identity.credentials import Credential, Credentials
from radixkv.service.server.identity.identity import Identity
from radixkv.service.server.identity.reloaded_files import ReloadedFiles
from radixkv.service.server.unfinished_calls import Context

HEADER = "authorization"

_SCHEME = "bearer "
_NAMES_OF_CERTIFICATE = ("peer_uri", "peer_dns", "x509_common_name")


class Callers(Protocol):
    """Knows the callers of a server."""

    def of_call(self, context: Context) -> Identity:
        """Return who makes a gRPC call.

        Raises:
            InvalidCredential: nobody that is known.
        """
        ...

    def of_header(self, authorization: str | None) -> Identity:
        """Return who sends a header `authorization` over HTTP; None stands for no header.

        Raises:
            InvalidCredential: nobody that is known.
        """
        ...


class Anyone:
    """Takes every caller for the same one.

    Args:
        identity: who it is.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def of_call(self, context: Context) -> Identity:
        """Return the identity."""
        return self._identity

    def of_header(self, authorization: str | None) -> Identity:
        """Return the identity."""
        return self._identity


class KnownCallers:
    """Knows callers by the credentials that they show: a token if there is one, otherwise a certificate.

    Args:
        credentials: as they are now.
        has_certificates: whether connections have certificates of callers, which gRPC has checked.
        unix_time_s: the time that credentials expire by.
    """

    def __init__(
        self,
        credentials: ReloadedFiles[Credentials],
        *,
        has_certificates: bool,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._credentials = credentials
        self._has_certificates = has_certificates
        self._unix_time_s = unix_time_s

    def of_call(self, context: Context) -> Identity:
        """Return who makes a gRPC call; see `Callers`. Takes microseconds."""
        headers = [value for name, value in context.invocation_metadata() or () if name == HEADER]
        if headers or not self._has_certificates:
            return self._of_headers(headers)
        found = self._credentials.get().of_certificate(_names(context))
        return self._valid(found, "certificate: expected one with the name of a single credential, got another")

    def of_header(self, authorization: str | None) -> Identity:
        """Return who sends a header; see `Callers`."""
        return self._of_headers([] if authorization is None else [authorization])

    def _of_headers(self, headers: list[str | bytes]) -> Identity:
        if len(headers) != 1:
            raise InvalidCredential(f"{HEADER}: expected one bearer token, got {len(headers) or 'none'}")
        text = str(headers[0])
        if text[: len(_SCHEME)].lower() != _SCHEME:
            raise InvalidCredential(f"{HEADER}: expected Bearer and a token, got something else")
        found = self._credentials.get().of_token(text[len(_SCHEME) :].strip())
        return self._valid(found, f"{HEADER}: expected a token of this service, got another")

    def _valid(self, found: Credential | None, refusal: str) -> Identity:
        if found is None:
            raise InvalidCredential(refusal)
        if found.expires_at_s is not None and self._unix_time_s() >= found.expires_at_s:
            raise InvalidCredential("credential: expected one that is valid now, got one that has expired")
        return found.identity


def _names(context: Context) -> Iterable[str]:
    shown = context.auth_context()
    for kind in _NAMES_OF_CERTIFICATE:
        for name in shown.get(kind, ()):
            yield name.decode(errors="replace")
