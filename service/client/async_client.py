"""The client for event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, overload

import grpc
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from radixkv.api.retention import Retention
from radixkv.service.client.access import Access, File
from radixkv.service.client.channel import Options, async_channel_to, call_of, channel_options, stubs, target, timeout
from radixkv.service.client.diagnosis import Diagnosis, proxy_variable
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
from radixkv.service.client.served_tokenizer import AsyncServedTokenizer
from radixkv.service.client.streams import AsyncAnswerStream
from radixkv.service.client.text_answers import AsyncTextAnswer, new_text
from radixkv.service.text.answer_text import AnswerText
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.token_ids import TokenIds, pack_token_ids, write_token_ids
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
from radixkv.v1.prefill_pb2 import GenerateRequest, GenerateResponse, PrefillResponse, ProbeResponse


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
        self._diagnosis = Diagnosis(
            address,
            has_tls=tls_ca is not None,
            has_certificate=certificate is not None,
            proxy=proxy_variable(address, options),
        )
        self._is_closed = False
        self._channel = async_channel_to(address, self._access.credentials, channel_options(options, retries))
        self._prefill, self._cache, self._model, self._events = stubs(self._channel)
        self._fleet = FleetServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._served = AsyncServedTokenizer(self._model, self._chunks)
        self.public = AsyncPublicPrefixes(self._cache, self._ask, self._served)
        self._check_health = health_check(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and cancel calls in flight. Closing again does nothing."""
        self._is_closed = True
        await self._channel.close(None)

    async def prefill(
        self, prompt: str | TokenIds, *, timeout_s: float | None = None, **options: Unpack[PrefillOptions]
    ) -> PrefillResponse:
        """Prefill one prompt; see `Client.prefill`. Cancelling the awaiting task cancels the request."""
        request = prefill_request(await self._served.token_ids(prompt, timeout_s), options)
        answer: PrefillResponse = await self._ask(
            self._prefill.Prefill, request, self._access.metadata_of(request), timeout_s
        )
        return answer

    @overload
    def generate(
        self, prompt: str, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncTextAnswer: ...

    @overload
    def generate(
        self, prompt: TokenIds, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[GenerateResponse]: ...

    def generate(
        self, prompt: str | TokenIds, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncTextAnswer | AsyncIterator[GenerateResponse]:
        """Continue a prompt; see `Client.generate`. `async for` reads the answer; a text is sent when that begins."""
        if not isinstance(prompt, str):
            return self._generate(generate_request(prompt, options), timeout_s)
        return self._answer(lambda tokenizer: tokenizer.encode(prompt), timeout_s, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncTextAnswer:
        """Answer a conversation; see `Client.chat`. It is put into the template when the answer is first read."""

        def encode(tokenizer: Tokenizer) -> list[int]:
            return tokenizer.encode_chat(
                messages, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
            )

        return self._answer(encode, timeout_s, options)

    async def probe(
        self, prompt: str | TokenIds, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> ProbeResponse:
        """Ask how many tokens a prefill would reuse now; see `Client.probe`."""
        request = probe_request(await self._served.token_ids(prompt), tenant=tenant, adapter=adapter, salt=salt)
        answer: ProbeResponse = await self._ask(self._prefill.Probe, request, self._access.metadata_of(request))
        return answer

    async def retain(
        self, prompt: str | TokenIds, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> RetainResponse:
        """Set the priority of a cached range; see `Client.retain`."""
        token_ids = await self._served.token_ids(prompt)
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
        """Return the tokenizer of the served model; see `Client.tokenizer`."""
        return await self._served.load()

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False, timeout_s: float | None = None
    ) -> AsyncIterator[EventBatch]:
        """Follow what is cached; see `Client.subscribe`. `async for` reads the batches."""
        request = SubscribeRequest(start_sequence_number=start_sequence_number, stores=stores)
        return self._stream(self._events.Subscribe, request, timeout(timeout_s))

    def _generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncAnswerStream:
        metadata = self._access.metadata_of(request.prefill)
        return self._stream(self._prefill.Generate, request, self._timeout(timeout_s), metadata)

    def _answer(
        self, encode: Callable[[Tokenizer], list[int]], timeout_s: float | None, options: GenerateOptions
    ) -> AsyncTextAnswer:
        request = generate_request([], options)  # so that a wrong option is refused here, as it is for token ids

        async def start() -> tuple[AsyncGenerator[GenerateResponse], Callable[[], AnswerText]]:
            tokenizer = await self._served.get(timeout_s)
            prompt_ids = await asyncio.to_thread(encode, tokenizer)
            write_token_ids(request.prefill, pack_token_ids(prompt_ids))
            return self._generate(request, timeout_s), new_text(tokenizer, prompt_ids, options)

        return AsyncTextAnswer(start)

    async def _ask(self, call: Any, request: Message, metadata: Any = None, timeout_s: float | None = None) -> Any:
        self._require_open()
        timeout_s = self._timeout(timeout_s)
        try:
            return await call(request, timeout=timeout_s, metadata=metadata or self._access.metadata)
        except grpc.RpcError as error:
            raise self._diagnosis.error_of(error, call_of(request), timeout_s) from None

    def _stream(self, call: Any, request: Message, timeout_s: float | None, metadata: Any = None) -> AsyncAnswerStream:
        """Make a call with several answers. `timeout_s` is its deadline, whatever that of the client is."""
        self._require_open()
        answers = call(request, timeout=timeout_s, metadata=metadata or self._access.metadata)
        return AsyncAnswerStream(answers, lambda error: self._diagnosis.error_of(error, call_of(request), timeout_s))

    def _chunks(self, call: Any, request: Message, timeout_s: float | None) -> AsyncAnswerStream:
        return self._stream(call, request, self._timeout(timeout_s))

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout(timeout_s)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("client: it has been closed; make another one")
