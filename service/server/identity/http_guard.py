"""Asks callers over HTTP for the token of an admin or a reader."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from http import HTTPStatus
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from radixkv.errors import InvalidCredential
from radixkv.service.server.identity.callers import Callers
from radixkv.service.server.identity.identity import OPERATORS


def authorize(callers: Callers, authorization: str | None) -> HTTPStatus:
    """Return OK for an admin or a reader, FORBIDDEN for others with a credential, and UNAUTHORIZED for the rest.

    Args:
        callers: those who are known.
        authorization: the header; None without one.
    """
    try:
        caller = callers.of_header(authorization)
    except InvalidCredential:
        return HTTPStatus.UNAUTHORIZED
    return HTTPStatus.OK if caller.role in OPERATORS else HTTPStatus.FORBIDDEN


def guarded(app: WSGIApplication, callers: Callers, open_paths: Collection[str]) -> WSGIApplication:
    """Put the check before an application, on all paths but `open_paths`."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status = HTTPStatus.OK
        if environ["PATH_INFO"] not in open_paths:
            status = authorize(callers, environ.get("HTTP_AUTHORIZATION"))
        if status is HTTPStatus.OK:
            return app(environ, start_response)
        text = f"{status.phrase}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
        if status is HTTPStatus.UNAUTHORIZED:
            headers.append(("WWW-Authenticate", "Bearer"))
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [text]

    return answer
