"""One connection of the HTTP port."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from aiohttp import StreamReader, web

from radixkv.errors import InvalidRequest
from radixkv.service.http.api_request import id_headers
from radixkv.service.http.openai_responses import error_object
from radixkv.service.server.servicers.messages import new_request_id

_MAX_HEADER_BYTES = 16_384  # of the request line, and of each header
_MAX_HEAD_BYTES = 65_536  # of all headers of a request together
_END_OF_HEAD = b"\r\n\r\n"
_MAX_PARTIAL_END_BYTES = len(_END_OF_HEAD) - 1

# aiohttp would log a traceback for every malformed request. `HttpPort` logs exceptions of handlers itself.
_silent_logger = logging.Logger("aiohttp", logging.CRITICAL + 1)

# Returns the response to a request that failed.
Failure = Callable[[web.BaseRequest, Exception], web.Response]


class NotHttp(InvalidRequest):
    """What a client sent is no HTTP request, or has headers that are too large."""


class HttpConnection(web.RequestHandler):
    """One connection, which answers in the form of the APIs where aiohttp would refuse a request with plain text.

    aiohttp limits each header, and their number, but not all of them together; this class does.

    Args:
        server: the server that the connection belongs to.
        failure: returns the response to a request that failed.
        idle_s: seconds after a response within which the next request must arrive.
    """

    __slots__ = ("_content", "_failure", "_has_head", "_last_bytes", "_num_head_bytes")

    def __init__(self, server: web.Server, failure: Failure, idle_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            access_log=None,  # type: ignore[arg-type]  # the annotation lacks None, for no log
            logger=_silent_logger,
            keepalive_timeout=idle_s,
            auto_decompress=False,
        )
        self._failure = failure
        self._has_head = False  # whether all headers of the current request have arrived
        self._num_head_bytes = 0
        self._last_bytes = b""  # the last bytes of the headers so far, with which `_END_OF_HEAD` may begin
        self._content: StreamReader | None = None  # the body of the current request

    def note_request(self, content: StreamReader) -> None:
        """Record that a request with this body is answered now."""
        self._content = content

    def data_received(self, data: bytes) -> None:
        """Process received data. Answers 431 and closes the connection if the headers of a request are too large."""
        if self._content is not None and self._content.is_eof():
            # The previous request has arrived completely, so that these data begin the next one.
            self._content = None
            self._has_head = False
            self._num_head_bytes = 0
            self._last_bytes = b""
        if not self._has_head:
            end = (self._last_bytes + data).find(_END_OF_HEAD)
            self._has_head = end >= 0
            self._num_head_bytes += end if self._has_head else len(data)
            self._last_bytes = (self._last_bytes + data)[-_MAX_PARTIAL_END_BYTES:]
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self._refuse_head()
                return
        super().data_received(data)

    def _refuse_head(self) -> None:
        if self.transport is None:
            return
        message = f"request: expected headers of at most {_MAX_HEAD_BYTES} bytes together, got more"
        body = json.dumps({"type": "error", **error_object(message, 431)})  # has the fields of both APIs
        headers = {
            "content-type": "application/json",
            "connection": "close",
            "content-length": len(body),
            **id_headers(new_request_id()),
        }
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        status_line = "HTTP/1.1 431 Request Header Fields Too Large\r\n"
        self.transport.write(f"{status_line}{''.join(lines)}\r\n{body}".encode())
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a request that could not be read, or whose handler failed; it ends the connection.

        Raises:
            ConnectionError: a part of a response was sent before.
        """
        super().handle_error(request, status, exc, message)  # raises, or returns plain text
        error = exc if status >= 500 and isinstance(exc, Exception) else _not_http()
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


def _not_http() -> NotHttp:
    return NotHttp(
        f"request: expected HTTP/1.1, with a request line and headers of at most {_MAX_HEADER_BYTES} bytes each, got "
        "something else"
    )
