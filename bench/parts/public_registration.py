"""Registers the shared prefixes of a workload as public while it is replayed."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from bench.parts.workloads import WorkItem
from radixkv.errors import ConfigError
from radixkv.service.client.requests import prompt_request
from radixkv.v1 import cache_pb2
from radixkv.v1.cache_pb2_grpc import CacheServiceStub

PublicTokens = dict[tuple[str, bytes], npt.NDArray[np.uint32]]
"""The tokens of each public prefix, by the name of its adapter and its bytes."""


def public_tokens(items: Sequence[WorkItem], prefix_tokens: int) -> PublicTokens:
    """Return the distinct prefixes of a workload."""
    prefixes = ((item.adapter, item.token_ids[:prefix_tokens]) for item in items)
    return {(adapter, prefix.tobytes()): prefix for adapter, prefix in prefixes}


@contextlib.asynccontextmanager
async def registered_prefixes(channel: grpc.aio.Channel, public: PublicTokens, timeout_s: float) -> AsyncIterator[None]:
    """Register prefixes, and unregister them at the end.

    Raises:
        ConfigError: the server refuses a prefix.
    """
    cache: Any = CacheServiceStub(channel)  # type: ignore[no-untyped-call]
    run_id = secrets.token_hex(4)
    names: list[str] = []
    try:
        for (adapter, _), prefix in public.items():
            name = f"replay-{run_id}-{len(names)}"
            try:
                await cache.RegisterPublicPrefix(
                    prompt_request(cache_pb2.RegisterPublicPrefixRequest, prefix, name=name, adapter=adapter),
                    timeout=timeout_s,
                )
            except grpc.aio.AioRpcError as error:
                raise ConfigError(f"--public-prefix: {error.code().name}: {error.details()}") from error
            names.append(name)
        yield
    finally:
        for name in names:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a server that has stopped has no prefixes
                request = cache_pb2.UnregisterPublicPrefixRequest(name=name)
                await cache.UnregisterPublicPrefix(request, timeout=timeout_s)
