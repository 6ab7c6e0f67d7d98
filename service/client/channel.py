"""Connections to a service: its address, the options of the gRPC channel, deadlines and retries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from radixkv.service.client.access import is_on_this_machine
from radixkv.v1.cache_pb2_grpc import CacheServiceStub
from radixkv.v1.events_pb2_grpc import EventServiceStub
from radixkv.v1.model_pb2_grpc import ModelServiceStub
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub

Options = Sequence[tuple[str, Any]]

MAX_RETRIES = 4  # gRPC makes at most 5 attempts, whatever its service config says

_RETRIED_BYTES = 2**31 - 1  # of a call; by default gRPC tries none again that sends more than 256 KiB

_MAX_TIMEOUT_S = 366 * 24 * 3600  # gRPC's own clock overflows far beyond it

# gRPC's own default refuses messages above 4 MiB: a million token ids, or the logits of a large batch of callers.
_UNLIMITED: Options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

# Calls that may reach the service twice and leave it as one call does. A second Release would find no lease, and a
# second Purge would count no blocks.
_IDEMPOTENT = {
    "radixkv.v1.PrefillService": ("Prefill", "Generate", "Probe", "Renew"),
    "radixkv.v1.CacheService": ("Stats", "Retain", "ListSegments", "ListAdapters", "ListPublicPrefixes"),
    "radixkv.v1.ModelService": ("GetTokenizer",),
}


def target(address: str) -> str:
    """Check an address: gRPC would dial port 443 where none is given, and any port modulo 65536.

    Raises:
        TypeError: it is no text.
        ValueError: it has no port from 1 to 65535.
    """
    if not isinstance(address, str):
        raise TypeError(f"address: expected HOST:PORT, got {address!r}")
    if address.startswith(("unix:", "dns:", "ipv4:", "ipv6:", "xds:")):
        return address
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"address: expected HOST:PORT with a port from 1 to 65535, got {address!r}")
    return address


def timeout(timeout_s: float | None) -> float | None:
    """Check a deadline, in seconds from now; None for none.

    Raises:
        ValueError: it is not a positive number.
    """
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < _MAX_TIMEOUT_S):
        raise ValueError(f"timeout_s: expected more than 0 and less than {_MAX_TIMEOUT_S} seconds, got {timeout_s!r}")
    return timeout_s


def channel_options(options: Options, retries: int) -> list[tuple[str, Any]]:
    """Merge the caller's options over ours: messages of any size, and `retries` of calls of any size.

    Raises:
        ValueError: `retries` is not a whole number from 0 to `MAX_RETRIES`.
    """
    if isinstance(retries, bool) or not (isinstance(retries, int) and 0 <= retries <= MAX_RETRIES):
        raise ValueError(f"retries: expected 0 to {MAX_RETRIES}, got {retries!r}")
    ours: dict[str, Any] = dict(_UNLIMITED)
    if retries:
        ours |= {"grpc.service_config": _service_config(retries), "grpc.per_rpc_retry_buffer_size": _RETRIED_BYTES}
    return list({**ours, **dict(options)}.items())  # gRPC keeps the first of two equal names


def named(server_name: str) -> Options:
    """Return the options of a channel to a server whose certificate has this name; empty for that of its address."""
    return (("grpc.ssl_target_name_override", server_name),) if server_name else ()


def channel_to(address: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.Channel:
    """Make a channel, with TLS if there are credentials. Connects lazily.

    A service on this machine is connected to directly, even if an environment variable such as `http_proxy` is set.
    """
    options = _without_proxy(address, options)
    if credentials is None:
        return grpc.insecure_channel(target(address), options=options)
    return grpc.secure_channel(target(address), credentials, options=options)


def async_channel_to(address: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.aio.Channel:
    """Make a channel for the running event loop; see `channel_to`."""
    options = _without_proxy(address, options)
    if credentials is None:
        return grpc.aio.insecure_channel(target(address), options=options)
    return grpc.aio.secure_channel(target(address), credentials, options=options)


def call_of(request: Message) -> str:
    """Return the name of the call that takes a message: all are named alike, such as `Prefill` and `PrefillRequest`."""
    if isinstance(request, StringValue):
        return "Check"  # of a server's health; see `health_check`
    return str(request.DESCRIPTOR.name).removesuffix("Request")


def stubs(
    channel: grpc.Channel | grpc.aio.Channel,
) -> tuple[PrefillServiceStub, CacheServiceStub, ModelServiceStub, EventServiceStub]:
    """Make the generated stubs of all services."""
    # They serve both kinds of channel and carry no annotations.
    return (
        PrefillServiceStub(channel),  # type: ignore[no-untyped-call]
        CacheServiceStub(channel),  # type: ignore[no-untyped-call]
        ModelServiceStub(channel),  # type: ignore[no-untyped-call]
        EventServiceStub(channel),  # type: ignore[no-untyped-call]
    )


def _without_proxy(address: str, options: Options) -> Options:
    """Add that gRPC uses no proxy, if the address is on this machine and the options don't say otherwise."""
    return (*options, ("grpc.enable_http_proxy", 0)) if is_on_this_machine(address) else options


def _service_config(retries: int) -> str:
    methods = [{"service": service, "method": name} for service, names in _IDEMPOTENT.items() for name in names]
    policy = {
        "maxAttempts": 1 + retries,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": methods, "retryPolicy": policy}]})
