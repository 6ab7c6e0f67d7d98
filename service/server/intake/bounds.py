"""Bounds of messages and connections, as gRPC is told of them."""

from __future__ import annotations

from typing import Any

import grpc.aio

from radixkv.api.limits import Limits
from radixkv.config import ServerConfig
from radixkv.service.server.accept_loop import make_server

# A token of its own field: a tag and four bytes.
_TOKEN_BYTES = 5
# All else in a request: a schema has 65,536 characters at most.
_OTHER_BYTES = 2**19
_MAX_INT32 = 2**31 - 1  # the largest number that gRPC takes

# Most bytes in memory of a call whose message is not read yet. gRPC's own window is 4 MiB a call.
WINDOW_BYTES = 65_536

# `Intake` refuses calls and counts that. gRPC, which does so silently, comes in only if that takes too long.
_TIMES_MAX_CALLS = 4


def largest_message_bytes(config: ServerConfig, limits: Limits) -> int:
    """Return the size of the largest message that is accepted."""
    if config.max_message_bytes is not None:
        return config.max_message_bytes
    return min(_MAX_INT32, limits.max_prompt_tokens * _TOKEN_BYTES + _OTHER_BYTES)


def grpc_options(config: ServerConfig, limits: Limits) -> list[tuple[str, Any]]:
    """Return the options of the gRPC server.

    The window of a call does not grow with the line: it bounds what a connection can leave in memory. A connection
    takes at most one window in a round trip, 3 MB/s at 20 ms.
    """
    return [
        ("grpc.so_reuseport", 0),  # otherwise a second server on the port would take half the requests
        ("grpc.max_receive_message_length", largest_message_bytes(config, limits)),
        ("grpc.max_send_message_length", -1),  # answers with logits may be large
        ("grpc.max_concurrent_streams", config.max_connection_calls),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # Beyond 1,000 calls that no handler has taken yet, gRPC would cancel new ones at random, whoever makes them.
        ("grpc.server.max_pending_requests", config.max_calls),
        ("grpc.server.max_pending_requests_hard_limit", min(2 * config.max_calls, _MAX_INT32)),
        ("grpc.max_connection_idle_ms", round(config.connection_idle_s * 1000)),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        # A connection that does not say what it wants.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.settings_timeout", 10_000),
        # Callers that vanish without closing their connection are noticed within 40 s, not 2 hours.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Callers that ping more often than every 5 minutes without a call, or every 5 s, are sent away.
        ("grpc.http2.max_ping_strikes", 2),
    ]


def bounded_server(
    config: ServerConfig, limits: Limits, interceptor: grpc.aio.ServerInterceptor[Any, Any]
) -> grpc.aio.Server:
    """Make a gRPC server without services, whose calls all go through `interceptor`."""
    max_calls = min(_TIMES_MAX_CALLS * config.max_calls, _MAX_INT32)
    return make_server([interceptor], grpc_options(config, limits), max_calls)
