"""The calls of a client about public prefixes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy.typing as npt

from radixkv.service.token_ids import pack_token_ids, write_token_ids
from radixkv.v1.cache_pb2 import (
    ListPublicPrefixesRequest,
    ListPublicPrefixesResponse,
    PublicPrefix,
    RegisterPublicPrefixRequest,
    UnregisterPublicPrefixRequest,
)
from radixkv.v1.cache_pb2_grpc import CacheServiceStub


class PublicPrefixes:
    """Prefixes that the prompts of all tenants use, such as system prompts. `Client.public` is one.

    Args:
        cache: the calls of the service.
        ask: makes one.
    """

    def __init__(self, cache: CacheServiceStub, ask: Callable[[Any, Any], Any]) -> None:
        self._cache = cache
        self._ask = ask

    def register(self, name: str, token_ids: npt.ArrayLike, *, adapter: str = "") -> PublicPrefix:
        """Make a prefix public. Returns when it is computed.

        Args:
            name: not that of another public prefix.
            token_ids: at least those of a block; see `Client.prefill`.
            adapter: name of a loaded adapter; empty for the model itself.

        Raises:
            TypeError, ValueError: an argument does not fit; nothing was sent.
            grpc.RpcError: the service refused, or can't be reached.
        """
        answer: PublicPrefix = self._ask(
            self._cache.RegisterPublicPrefix, register_request(name, token_ids, adapter)
        ).public_prefix
        return answer

    def unregister(self, name: str) -> PublicPrefix:
        """Let no more prompts use a prefix. Returns what it was. Raises like `register`."""
        request = UnregisterPublicPrefixRequest(name=name)
        answer: PublicPrefix = self._ask(self._cache.UnregisterPublicPrefix, request).public_prefix
        return answer

    def list(self) -> ListPublicPrefixesResponse:
        """List those that are registered. Raises like `register`."""
        answer: ListPublicPrefixesResponse = self._ask(self._cache.ListPublicPrefixes, ListPublicPrefixesRequest())
        return answer


class AsyncPublicPrefixes:
    """The same, awaited. `AsyncClient.public` is one."""

    def __init__(self, cache: CacheServiceStub, ask: Callable[[Any, Any], Awaitable[Any]]) -> None:
        self._cache = cache
        self._ask = ask

    async def register(self, name: str, token_ids: npt.ArrayLike, *, adapter: str = "") -> PublicPrefix:
        """Make a prefix public; see `PublicPrefixes.register`."""
        request = register_request(name, token_ids, adapter)
        answer: PublicPrefix = (await self._ask(self._cache.RegisterPublicPrefix, request)).public_prefix
        return answer

    async def unregister(self, name: str) -> PublicPrefix:
        """Let no more prompts use a prefix; see `PublicPrefixes.unregister`."""
        request = UnregisterPublicPrefixRequest(name=name)
        answer: PublicPrefix = (await self._ask(self._cache.UnregisterPublicPrefix, request)).public_prefix
        return answer

    async def list(self) -> ListPublicPrefixesResponse:
        """List those that are registered; see `PublicPrefixes.list`."""
        request = ListPublicPrefixesRequest()
        answer: ListPublicPrefixesResponse = await self._ask(self._cache.ListPublicPrefixes, request)
        return answer


def register_request(name: str, token_ids: npt.ArrayLike, adapter: str) -> RegisterPublicPrefixRequest:
    """Make the message of `register`, which names what it raises."""
    request = RegisterPublicPrefixRequest(name=name, adapter=adapter)
    write_token_ids(request, pack_token_ids(token_ids))
    return request
