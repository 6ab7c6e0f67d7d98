"""The calls of a client about public prefixes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from radixkv.service.client.served_tokenizer import AsyncServedTokenizer, ServedTokenizer
from radixkv.service.token_ids import TokenIds, pack_token_ids, write_token_ids
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
        served: the tokenizer of the served model.
    """

    def __init__(self, cache: CacheServiceStub, ask: Callable[[Any, Any], Any], served: ServedTokenizer) -> None:
        self._cache = cache
        self._ask = ask
        self._served = served

    def register(self, name: str, prefix: str | TokenIds, *, adapter: str = "") -> PublicPrefix:
        """Make a prefix public. Returns when it is computed.

        Args:
            name: not that of another public prefix.
            prefix: text or token ids, at least those of a block; see `Client.prefill`. Text that goes on can be encoded
                differently around the place where this one ends, which costs the last token or two.
            adapter: name of a loaded adapter; empty for the model itself.

        Raises:
            TypeError, ValueError: an argument does not fit; nothing was sent.
            ServiceError: the service refused the request, or can't be reached.
        """
        request = register_request(name, self._served.token_ids(prefix), adapter)
        answer: PublicPrefix = self._ask(self._cache.RegisterPublicPrefix, request).public_prefix
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

    def __init__(
        self, cache: CacheServiceStub, ask: Callable[[Any, Any], Awaitable[Any]], served: AsyncServedTokenizer
    ) -> None:
        self._cache = cache
        self._ask = ask
        self._served = served

    async def register(self, name: str, prefix: str | TokenIds, *, adapter: str = "") -> PublicPrefix:
        """Make a prefix public; see `PublicPrefixes.register`."""
        request = register_request(name, await self._served.token_ids(prefix), adapter)
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


def register_request(name: str, token_ids: TokenIds, adapter: str) -> RegisterPublicPrefixRequest:
    """Make the message of `register`, which names what it raises."""
    request = RegisterPublicPrefixRequest(name=name, adapter=adapter)
    write_token_ids(request, pack_token_ids(token_ids))
    return request
