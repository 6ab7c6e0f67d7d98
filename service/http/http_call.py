"""One HTTP request, with the methods of a gRPC call that authorization, receiving and servicers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

import grpc
from aiohttp import web

from radixkv.errors import DeadlinePassed, InvalidRequest
from radixkv.service.http.api_errors import BodyTooLarge
from radixkv.service.server.calls import Context


def context_of(request: web.BaseRequest, max_body_bytes: int) -> Context:
    """Return an `HttpCall` with the type of the context of a gRPC call.

    An HTTP request passes through the same authorizer, receiver and servicer as a gRPC call.
    """
    return cast("Context", HttpCall(request, max_body_bytes))


class HttpCall:
    """One HTTP request, with the methods of `grpc.aio.ServicerContext` that this server uses.

    Args:
        request: the request.
        max_body_bytes: maximum size of the body.
    """

    def __init__(self, request: web.BaseRequest, max_body_bytes: int) -> None:
        self._request = request
        self._max_body_bytes = max_body_bytes
        headers = [(name.lower(), value) for name, value in request.headers.items()]
        api_key = request.headers.get("x-api-key")  # Anthropic's header for a token
        if api_key is not None and "authorization" not in request.headers:
            headers.append(("authorization", f"Bearer {api_key}"))
        # aiohttp represents bytes that are not UTF-8 as surrogates, which become question marks here.
        self._metadata = tuple((name, value.encode(errors="replace").decode()) for name, value in headers)

    def peer(self) -> str:
        """Return the connection as gRPC names it, such as `ipv4:127.0.0.1:50000`."""
        transport = self._request.transport
        address = None if transport is None else transport.get_extra_info("peername")
        if not isinstance(address, tuple):
            return "unknown"
        host, port = str(address[0]), address[1]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers; names are lower case."""
        return self._metadata

    def auth_context(self) -> Mapping[str, list[bytes]]:
        """Return the client's TLS identity, which is empty, because HTTPS does not request client certificates."""
        return {}

    def time_remaining(self) -> float | None:
        """Return None: HTTP requests have the default deadline of the server."""
        return None

    def code(self) -> grpc.StatusCode | None:
        """Return None: the call has no gRPC status."""
        return None

    async def abort(self, code: grpc.StatusCode, details: str = "", *_: Any) -> NoReturn:
        """Raise `DeadlinePassed` if a servicer ends a call with DEADLINE_EXCEEDED, or else `InvalidRequest`."""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlinePassed(details)
        raise InvalidRequest(details)

    async def read(self) -> bytes:
        """Receive the body.

        Raises:
            InvalidRequest: the body is compressed.
            BodyTooLarge: the body is larger than `max_body_bytes`.
        """
        if self._request.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("content-encoding: expected none, got another one; send the body uncompressed")
        declared = self._request.content_length
        if declared is not None and declared > self._max_body_bytes:
            raise BodyTooLarge(f"body: expected at most {self._max_body_bytes} bytes, got {declared}")
        pieces: list[bytes] = []
        num_bytes = 0
        async for piece in self._request.content.iter_any():
            num_bytes += len(piece)
            if num_bytes > self._max_body_bytes:
                raise BodyTooLarge(f"body: expected at most {self._max_body_bytes} bytes, got more")
            pieces.append(piece)
        return b"".join(pieces)
