"""A gRPC server that only sends bytes, to measure the cost of a stream.

    python -m bench.fleet.bare_stream

Prints `listening on HOST:PORT`. A request is the text `NUM SIZE`; the response is a stream of
NUM messages of SIZE bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

METHOD = "/bare/Stream"


def main() -> None:
    """Serve until the process ends."""
    asyncio.run(_serve())


async def _serve() -> None:
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(_stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Stream": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    num_messages, message_bytes = map(int, request.split())
    message = bytes(message_bytes)
    for _ in range(num_messages):
        yield message


if __name__ == "__main__":
    main()
