"""One connection of the HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from radixkv.errors import InvalidRequest

# Returns the response to a request that failed.
Failure = Callable[[web.BaseRequest, Exception], web.Response]


class NotHttp(InvalidRequest):
    """What a client sent is no HTTP request, or has headers that are too large."""


class HttpConnection(web.RequestHandler):
    """One connection. What aiohttp refuses by itself, as plain text, gets a response in the form of the APIs.

    Args:
        server: the server that the connection belongs to.
        failure: returns the response to a request that failed.
        max_header_bytes: maximum size of the request line, and of each header.
        options: further arguments of `web.RequestHandler`.
    """

    __slots__ = ("_failure",)

    def __init__(self, server: web.Server, failure: Failure, max_header_bytes: int, **options: Any) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            max_line_size=max_header_bytes,
            max_field_size=max_header_bytes,
            **options,
        )
        self._failure = failure

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a request that could not be read, or whose handler failed; it ends the connection.

        Raises:
            ConnectionError: a part of another response was sent.
        """
        super().handle_error(request, status, exc, message)  # raises, or returns plain text
        error = exc if status >= 500 and isinstance(exc, Exception) else _not_http(self.max_field_size)
        response = self._failure(request, error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, which is an exception if the request did not reach its handler."""
        if isinstance(resp, web.HTTPException):
            resp = self._failure(request, resp)
        return await super().finish_response(request, resp, start_time)


def _not_http(max_header_bytes: int) -> NotHttp:
    return NotHttp(
        f"request: expected HTTP/1.1, with a request line and headers of at most {max_header_bytes} bytes each, got "
        "something else"
    )
