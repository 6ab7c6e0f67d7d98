"""Limits of messages, connections and calls that gRPC itself enforces."""

from __future__ import annotations

from typing import Any

import grpc.aio

from radixkv.api.limits import Limits
from radixkv.config import ServerConfig
from radixkv.service.server.accept_loop import make_server
from radixkv.service.server.open_files import max_connections

# A token id that is not packed: a tag and four bytes.
_UNPACKED_TOKEN_BYTES = 5
# Everything else in a request. The largest other field is a JSON schema, of at most 65,536 characters.
_OTHER_BYTES = 2**19
_MAX_INT32 = 2**31 - 1  # the largest value that gRPC accepts

# Flow-control window: maximum bytes in memory of a call whose message is not being read. gRPC's default is 4 MiB.
WINDOW_BYTES = 65_536

# A client may send pings this far apart while it has a call, even if the server sends no data for a long time, such as
# during a long prefill. gRPC's default of 5 minutes would close the connections of clients with common keepalive times.
_MIN_PING_INTERVAL_MS = 5000

# The receiver refuses calls above `max_calls` and counts them. gRPC refuses silently, only above this multiple of it.
_MAX_CALLS_FACTOR = 4


def max_message_bytes(config: ServerConfig, limits: Limits) -> int:
    """Return the size of the largest message that is accepted."""
    if config.max_message_bytes is not None:
        return config.max_message_bytes
    return min(_MAX_INT32, limits.max_prompt_tokens * _UNPACKED_TOKEN_BYTES + _OTHER_BYTES)


def grpc_options(config: ServerConfig, limits: Limits) -> list[tuple[str, Any]]:
    """Return the channel arguments of the gRPC server.

    The flow-control window is fixed, so that it bounds the unread bytes of a connection in memory. It also limits the
    rate of a connection to one window per round trip, which is 3 MB/s at 20 ms.
    """
    return [
        # Otherwise a second server could bind the port, and would receive half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes(config, limits)),
        ("grpc.max_send_message_length", -1),  # responses with logits may be large
        ("grpc.max_concurrent_streams", config.max_connection_calls),
        ("grpc.max_allowed_incoming_connections", max_connections(config)),
        # By default, gRPC cancels new calls of any client at random while more than 1,000 calls have no handler yet.
        ("grpc.server.max_pending_requests", config.max_calls),
        ("grpc.server.max_pending_requests_hard_limit", min(2 * config.max_calls, _MAX_INT32)),
        ("grpc.max_connection_idle_ms", round(config.connection_idle_s * 1000)),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        # Close connections that do not complete their handshake within 10 s.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.settings_timeout", 10_000),
        # Detect clients that vanish without closing their connection within 40 s instead of 2 hours.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # gRPC closes a connection at the third ping that follows another one too soon, without data from the server in
        # between. On a connection without calls, the minimum interval is 2 hours.
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]


def grpc_server(config: ServerConfig, limits: Limits) -> grpc.aio.Server:
    """Return a gRPC server with these limits, without services."""
    max_calls = min(_MAX_CALLS_FACTOR * config.max_calls, _MAX_INT32)
    return make_server(grpc_options(config, limits), max_calls)
