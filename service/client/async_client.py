"""The client for event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, Unpack

import numpy.typing as npt
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from radixkv.api.retention import Retention
from radixkv.service.client.access import Access, File
from radixkv.service.client.channel import Options, async_channel_to, channel_options, stubs, target, timeout
from radixkv.service.client.health import ServingStatus, health_check
from radixkv.service.client.prefix_key import PrefixKey
from radixkv.service.client.public_prefixes import AsyncPublicPrefixes
from radixkv.service.client.requests import (
    GenerateOptions,
    PrefillOptions,
    generate_request,
    prefill_request,
    probe_request,
    purge_request,
    retain_request,
    segments_request,
)
from radixkv.service.client.route_calls import AsyncRouteCalls
from radixkv.service.client.streams import AsyncAnswerStream
from radixkv.service.client.tokenizer_files import ArchiveReader, kept
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.cache_pb2 import (
    DrainRequest,
    ListAdaptersRequest,
    ListAdaptersResponse,
    ListSegmentsResponse,
    LoadAdapterRequest,
    LoadAdapterResponse,
    PurgeResponse,
    RetainResponse,
    StatsRequest,
    StatsResponse,
    UnloadAdapterRequest,
)
from radixkv.v1.events_pb2 import EventBatch, SubscribeRequest
from radixkv.v1.fleet_pb2_grpc import FleetServiceStub
from radixkv.v1.model_pb2 import GetTokenizerRequest
from radixkv.v1.prefill_pb2 import (
    GenerateResponse,
    PrefillResponse,
    ProbeResponse,
)


class AsyncClient(AsyncRouteCalls):
    """Awaited calls over one connection, with the arguments of `Client`. Make it inside the event loop that uses it.

    Attributes:
        public: calls about prefixes that the prompts of all tenants use.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        retries: int = 0,
        prefix_key_tokens: int = 0,
        tls_ca: File | None = None,
        token: str | None = None,
        certificate: File | None = None,
        key: File | None = None,
        options: Options = (),
    ) -> None:
        """Connect lazily; see `Client`."""
        self._timeout_s = timeout(timeout_s)
        self._access = Access(
            target(address),
            tls_ca=tls_ca,
            token=token,
            certificate=certificate,
            key=key,
            prefix_key=PrefixKey(prefix_key_tokens),
        )
        self._channel = async_channel_to(address, self._access.credentials, channel_options(options, retries))
        self._prefill, self._cache, self._model, self._events = stubs(self._channel)
        self._fleet = FleetServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._check_health = health_check(self._channel)
        self.public = AsyncPublicPrefixes(self._cache, self._ask)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and cancel calls in flight. Closing again does nothing."""
        await self._channel.close(None)

    async def prefill(
        self, token_ids: npt.ArrayLike, *, timeout_s: float | None = None, **options: Unpack[PrefillOptions]
    ) -> PrefillResponse:
        """Prefill one prompt; see `Client.prefill`. Cancelling the awaiting task cancels the request."""
        request = prefill_request(token_ids, options)
        answer: PrefillResponse = await self._ask(
            self._prefill.Prefill, request, self._access.metadata_of(request), timeout_s
        )
        return answer

    def generate(
        self, token_ids: npt.ArrayLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[GenerateResponse]:
        """Continue a prompt; see `Client.generate`. `async for` reads the answers."""
        request = generate_request(token_ids, options)
        metadata = self._access.metadata_of(request.prefill)
        return AsyncAnswerStream(self._prefill.Generate(request, timeout=self._timeout(timeout_s), metadata=metadata))

    async def probe(
        self, token_ids: npt.ArrayLike, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> ProbeResponse:
        """Ask how many tokens a prefill would reuse now; see `Client.probe`."""
        request = probe_request(token_ids, tenant=tenant, adapter=adapter, salt=salt)
        answer: ProbeResponse = await self._ask(self._prefill.Probe, request, self._access.metadata_of(request))
        return answer

    async def retain(
        self, token_ids: npt.ArrayLike, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> RetainResponse:
        """Set the priority of a cached range; see `Client.retain`."""
        request = retain_request(token_ids, retention, tenant=tenant, adapter=adapter, salt=salt)
        answer: RetainResponse = await self._ask(self._cache.Retain, request, self._access.metadata_of(request))
        return answer

    async def purge(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        salt: str | None = None,
        everything: bool = False,
    ) -> PurgeResponse:
        """Forget namespaces; see `Client.purge`."""
        request = purge_request(tenant, adapter, salt, everything=everything)
        answer: PurgeResponse = await self._ask(self._cache.Purge, request)
        return answer

    async def segments(
        self,
        *,
        tenant: str | None = None,
        page_size: int | None = None,
        page_token: str = "",
        hottest_first: bool = False,
        store: str = "",
    ) -> ListSegmentsResponse:
        """List what is cached, a page at a time; see `Client.segments`."""
        request = segments_request(tenant, page_size, page_token, store, hottest_first=hottest_first)
        answer: ListSegmentsResponse = await self._ask(self._cache.ListSegments, request)
        return answer

    async def stats(self, *, max_tenants: int | None = None, tenant: str | None = None) -> StatsResponse:
        """Read the contents of the cache and the counters of the service; see `Client.stats`."""
        request = StatsRequest(max_tenants=max_tenants, tenant=tenant)
        answer: StatsResponse = await self._ask(self._cache.Stats, request)
        return answer

    async def load_adapter(self, name: str, path: str) -> LoadAdapterResponse:
        """Let a name stand for an adapter; see `Client.load_adapter`."""
        answer: LoadAdapterResponse = await self._ask(self._cache.LoadAdapter, LoadAdapterRequest(name=name, path=path))
        return answer

    async def unload_adapter(self, name: str) -> None:
        """Let a name stand for nothing; see `Client.unload_adapter`."""
        await self._ask(self._cache.UnloadAdapter, UnloadAdapterRequest(name=name))

    async def adapters(self) -> ListAdaptersResponse:
        """List the adapters; see `Client.adapters`."""
        answer: ListAdaptersResponse = await self._ask(self._cache.ListAdapters, ListAdaptersRequest())
        return answer

    async def drain(self) -> None:
        """End the service as SIGTERM does; see `Client.drain`."""
        await self._ask(self._cache.Drain, DrainRequest())

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> ServingStatus:
        """Ask whether the service accepts requests; see `Client.health`."""
        status: ServingStatus = await self._ask(self._check_health, StringValue(value=service), timeout_s=timeout_s)
        return status

    async def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the served model, on a thread of its own; see `Client.tokenizer`."""
        reader = ArchiveReader()
        async for chunk in self._ask(self._model.GetTokenizer, GetTokenizerRequest(digest_only=True)):
            reader.put(chunk)
        if (directory := kept(reader.digest)) is None:
            async for chunk in self._ask(self._model.GetTokenizer, GetTokenizerRequest()):
                reader.put(chunk)
            directory = await asyncio.to_thread(reader.keep)
        return await asyncio.to_thread(Tokenizer.load, directory)

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False, timeout_s: float | None = None
    ) -> AsyncIterator[EventBatch]:
        """Follow what is cached; see `Client.subscribe`. `async for` reads the batches."""
        request = SubscribeRequest(start_sequence_number=start_sequence_number, stores=stores)
        return AsyncAnswerStream(
            self._events.Subscribe(request, timeout=timeout(timeout_s), metadata=self._access.metadata)
        )

    def _ask(self, call: Any, request: Message, metadata: Any = None, timeout_s: float | None = None) -> Any:
        return call(request, timeout=self._timeout(timeout_s), metadata=metadata or self._access.metadata)

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout(timeout_s)
