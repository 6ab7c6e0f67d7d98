"""The page on the metrics port and on the HTTP port, and the state that it draws."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from wsgiref.types import StartResponse, WSGIEnvironment

from radixkv.service.server.page.state_feed import StateFeed

_FILE = Path(__file__).with_name("page.html")
_WITHOUT_API, _WITH_API = b'<html lang="en">', b'<html lang="en" data-api>'


class Page:
    """Serves `/`, one HTML file without external assets, and `/state.json`, which the page polls every second.

    The page itself contains no secrets. If the state requires a bearer token (401), the page asks for one. Its content
    security policy allows only the script and style in the file.

    Args:
        feed: returns the state.
        has_api: whether the port serves OpenAI's API, which the playground of the page needs.
    """

    PATHS = ("/", "/state.json")

    def __init__(self, feed: StateFeed, *, has_api: bool = False) -> None:
        self._feed = feed
        self._html = _FILE.read_bytes()
        if has_api:
            self._html = self._html.replace(_WITHOUT_API, _WITH_API)
        self._policy = _policy(self._html.decode())

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one of `PATHS`."""
        status, headers, body = self.answer(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def answer(self, method: str, path: str) -> tuple[HTTPStatus, list[tuple[str, str]], bytes]:
        """Return the status, the headers and the body of the response to a request for one of `PATHS`.

        The status is 405 for methods other than GET and HEAD. For the state, it is 503 if the engine accepts no calls
        or does not respond in time; this method blocks until the engine has responded, or for 5 s. Thread-safe.
        """
        body: bytes | None
        if method not in ("GET", "HEAD"):
            status, media_type, body = HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"Method Not Allowed\n"
        elif path == "/":
            status, media_type, body = HTTPStatus.OK, "text/html", self._html
        else:
            status, media_type, body = HTTPStatus.OK, "application/json", self._feed.state()
        if body is None:
            status, media_type, body = HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"the engine does not respond\n"
        headers = [
            ("Content-Type", f"{media_type}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", self._policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ]
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        return status, headers, body


def _policy(html: str) -> str:
    """Return a Content-Security-Policy that allows the page's own script and style, by their digests."""
    sources = {}
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        sources[tag] = "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src '{sources['script']}'; style-src '{sources['style']}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
