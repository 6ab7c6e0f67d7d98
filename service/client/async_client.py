"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, overload

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from radixkv.api.retention import Retention
from radixkv.service.client import methods
from radixkv.service.client.address import ChannelOptions
from radixkv.service.client.connection import Connection, File, require_timeout
from radixkv.service.client.methods import METHODS, Method, Request, Response, ServingStatus
from radixkv.service.client.requests import (
    GenerateOptions,
    PrefillOptions,
    explain_request,
    generate_request,
    hint_request,
    make_request,
    prefill_request,
    prompt_request,
    purge_request,
    retain_request,
)
from radixkv.service.client.response_stream import AsyncResponseStream
from radixkv.service.client.served_tokenizer import AsyncServedTokenizer
from radixkv.service.client.text_answers import AsyncTextAnswer, detokenizer_factory
from radixkv.service.text.answer_text import AnswerText
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.token_ids import TokenIds, pack_token_ids, write_token_ids
from radixkv.v1.cache_pb2 import (
    DiagnoseRequest,
    DiagnoseResponse,
    DrainRequest,
    EndSessionRequest,
    EndSessionResponse,
    ExplainResponse,
    HintResponse,
    ListAdaptersRequest,
    ListAdaptersResponse,
    ListPublicPrefixesRequest,
    ListPublicPrefixesResponse,
    ListSegmentsRequest,
    ListSegmentsResponse,
    LoadAdapterRequest,
    LoadAdapterResponse,
    PublicPrefix,
    PurgeResponse,
    RegisterPublicPrefixRequest,
    RetainResponse,
    StatementRequest,
    StatementResponse,
    StatsRequest,
    StatsResponse,
    UnloadAdapterRequest,
    UnregisterPublicPrefixRequest,
)
from radixkv.v1.events_pb2 import EventBatch, SubscribeRequest
from radixkv.v1.fleet_pb2 import RouteRequest, RouteResponse
from radixkv.v1.model_pb2 import GetTokenizerRequest, TokenizerChunk
from radixkv.v1.prefill_pb2 import (
    FetchKVRequest,
    FetchKVResponse,
    GenerateRequest,
    GenerateResponse,
    PrefillResponse,
    ProbeRequest,
    ProbeResponse,
    ReleaseRequest,
    ReleaseResponse,
    RenewRequest,
    RenewResponse,
)


class AsyncClient:
    """The asyncio version of `Client`: its calls are coroutines or async iterators with the same arguments and errors.

    Create it inside the event loop that uses it.

    Attributes:
        public: the calls about public prefixes, which all tenants share.
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
        options: ChannelOptions = (),
    ) -> None:
        """Create a client; see `Client`. It connects with the first call."""
        self._connection = Connection(
            address,
            timeout_s=timeout_s,
            retries=retries,
            prefix_key_tokens=prefix_key_tokens,
            tls_ca=tls_ca,
            token=token,
            certificate=certificate,
            key=key,
            options=options,
        )
        self._is_closed = False
        self._channel = self._connection.open_async()
        self._stubs = {method: method.bind(self._channel) for method in METHODS}
        self._served_tokenizer = AsyncServedTokenizer(self._tokenizer_chunks)
        self.public = AsyncPublicPrefixClient(self._call, self._served_tokenizer)

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
        token_ids = await self._served_tokenizer.token_ids(prompt, timeout_s)
        return await self._call(methods.PREFILL, prefill_request(token_ids, options), timeout_s)

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
        """Generate a completion; see `Client.generate`. A text prompt is sent when the completion is first read."""
        if not isinstance(prompt, str):
            return self._generate(generate_request(prompt, options), timeout_s)
        return self._generate_text(lambda tokenizer: tokenizer.encode(prompt), timeout_s, options)

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
        """Generate the next message of a conversation; see `Client.chat`. The first read sends the prompt."""

        def encode(tokenizer: Tokenizer) -> list[int]:
            return tokenizer.encode_chat(
                messages, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
            )

        return self._generate_text(encode, timeout_s, options)

    async def probe(
        self, prompt: str | TokenIds, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> ProbeResponse:
        """Return how many tokens a prefill would reuse now; see `Client.probe`."""
        token_ids = await self._served_tokenizer.token_ids(prompt)
        request = prompt_request(ProbeRequest, token_ids, tenant=tenant, adapter=adapter, salt=salt)
        return await self._call(methods.PROBE, request)

    async def release(self, lease_id: str, *, tenant: str = "") -> ReleaseResponse:
        """Release a held lease; see `Client.release`."""
        return await self._call(methods.RELEASE, make_request(ReleaseRequest, lease_id=lease_id, tenant=tenant))

    async def renew(self, lease_id: str, *, tenant: str = "") -> RenewResponse:
        """Restart the time to live of a held lease; see `Client.renew`."""
        return await self._call(methods.RENEW, make_request(RenewRequest, lease_id=lease_id, tenant=tenant))

    def fetch_kv(
        self,
        lease_id: str,
        *,
        tenant: str = "",
        epoch: int = 0,
        first_block: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
        stores: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> AsyncGenerator[FetchKVResponse]:
        """Read the K/V of a held lease; see `Client.fetch_kv`."""
        request = make_request(
            FetchKVRequest,
            lease_id=lease_id,
            tenant=tenant,
            epoch=epoch,
            first_block=first_block,
            first_layer=first_layer,
            num_layers=num_layers,
            stores=stores,
        )
        return self._stream(methods.FETCH_KV, request, self._connection.timeout_s(timeout_s))

    async def retain(
        self, prompt: str | TokenIds, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> RetainResponse:
        """Set the retention priority of a cached range; see `Client.retain`."""
        token_ids = await self._served_tokenizer.token_ids(prompt)
        request = retain_request(token_ids, retention, tenant=tenant, adapter=adapter, salt=salt)
        return await self._call(methods.RETAIN, request)

    async def hint(
        self,
        actions: Sequence[Mapping[str, Any]],
        prompt: str | TokenIds | None = None,
        *,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
    ) -> HintResponse:
        """Apply hints about the future use of cached tokens; see `Client.hint`."""
        token_ids = None if prompt is None else await self._served_tokenizer.token_ids(prompt)
        request = hint_request(actions, token_ids, tenant=tenant, adapter=adapter, salt=salt)
        return await self._call(methods.HINT, request)

    async def explain(
        self,
        prompt: str | TokenIds,
        *,
        segments: Sequence[tuple[str, int]] = (),
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        omit_cached_text: bool = False,
    ) -> ExplainResponse:
        """Explain where and why a prompt diverges from what is cached in its namespace; see `Client.explain`."""
        request = explain_request(
            await self._served_tokenizer.token_ids(prompt),
            segments,
            tenant=tenant,
            adapter=adapter,
            salt=salt,
            omit_cached_text=omit_cached_text,
        )
        return await self._call(methods.EXPLAIN, request)

    async def end_session(self, session_id: str, *, tenant: str = "") -> EndSessionResponse:
        """End a session; see `Client.end_session`."""
        request = make_request(EndSessionRequest, tenant=tenant, session_id=session_id)
        return await self._call(methods.END_SESSION, request)

    async def purge(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        salt: str | None = None,
        everything: bool = False,
    ) -> PurgeResponse:
        """Drop everything that is cached for a tenant, an adapter or a salt; see `Client.purge`."""
        return await self._call(methods.PURGE, purge_request(tenant, adapter, salt, everything=everything))

    async def segments(
        self,
        *,
        tenant: str | None = None,
        page_size: int | None = None,
        page_token: str = "",
        hottest_first: bool = False,
        store: str = "",
        session_id: str = "",
    ) -> ListSegmentsResponse:
        """List the cached segments page by page; see `Client.segments`."""
        request = make_request(
            ListSegmentsRequest,
            tenant=tenant,
            page_size=page_size,
            page_token=page_token,
            hottest_first=hottest_first,
            store=store,
            session_id=session_id,
        )
        return await self._call(methods.LIST_SEGMENTS, request)

    async def stats(
        self, *, max_tenants: int | None = None, tenant: str | None = None, max_sessions: int = 0
    ) -> StatsResponse:
        """Return the contents of the cache and the counters of the server; see `Client.stats`."""
        return await self._call(
            methods.STATS, make_request(StatsRequest, max_tenants=max_tenants, tenant=tenant, max_sessions=max_sessions)
        )

    async def statement(
        self, *, since: str = "", until: str = "", tenant: str | None = None, by_day: bool = False
    ) -> StatementResponse:
        """Return what tenants used in a range of days; see `Client.statement`."""
        return await self._call(
            methods.STATEMENT, make_request(StatementRequest, since=since, until=until, tenant=tenant, by_day=by_day)
        )

    async def diagnose(
        self, *, tenant: str | None = None, max_causes: int = 10, omit_cached_text: bool = False
    ) -> DiagnoseResponse:
        """Return why recent prompts were not reused; see `Client.diagnose`."""
        return await self._call(
            methods.DIAGNOSE,
            make_request(DiagnoseRequest, tenant=tenant, max_causes=max_causes, omit_cached_text=omit_cached_text),
        )

    async def load_adapter(self, name: str, path: str) -> LoadAdapterResponse:
        """Load a LoRA adapter; see `Client.load_adapter`."""
        return await self._call(methods.LOAD_ADAPTER, make_request(LoadAdapterRequest, name=name, path=path))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; see `Client.unload_adapter`."""
        await self._call(methods.UNLOAD_ADAPTER, make_request(UnloadAdapterRequest, name=name))

    async def adapters(self) -> ListAdaptersResponse:
        """List the adapters; see `Client.adapters`."""
        return await self._call(methods.LIST_ADAPTERS, ListAdaptersRequest())

    async def drain(self) -> None:
        """Shut the server down as SIGTERM does; see `Client.drain`."""
        await self._call(methods.DRAIN, DrainRequest())

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> ServingStatus:
        """Return whether the server accepts requests; see `Client.health`."""
        response = await self._call(methods.HEALTH_CHECK, StringValue(value=service), timeout_s)
        return ServingStatus(response.value)

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the served model; see `Client.tokenizer`."""
        return await self._served_tokenizer.load()

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False, timeout_s: float | None = None
    ) -> AsyncGenerator[EventBatch]:
        """Subscribe to cache events; see `Client.subscribe`. Read the batches with `async for`."""
        request = make_request(SubscribeRequest, start_sequence_number=start_sequence_number, stores=stores)
        return self._stream(methods.SUBSCRIBE, request, require_timeout(timeout_s))

    async def route(
        self,
        prompt: str | TokenIds,
        *,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        avoid: Iterable[str] = (),
    ) -> RouteResponse:
        """Ask a fleet which replica should get a prompt; see `Client.route`."""
        token_ids = await self._served_tokenizer.token_ids(prompt)
        request = prompt_request(RouteRequest, token_ids, tenant=tenant, adapter=adapter, salt=salt, avoid=avoid)
        return await self._call(methods.ROUTE, request)

    def _generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncResponseStream[GenerateResponse]:
        return self._stream(methods.GENERATE, request, self._connection.timeout_s(timeout_s))

    def _generate_text(
        self, encode: Callable[[Tokenizer], list[int]], timeout_s: float | None, options: GenerateOptions
    ) -> AsyncTextAnswer:
        request = generate_request([], options)  # validates the options now, as for token ids

        async def start() -> tuple[AsyncGenerator[GenerateResponse], Callable[[], AnswerText]]:
            tokenizer = await self._served_tokenizer.get(timeout_s)
            token_ids = await asyncio.to_thread(encode, tokenizer)
            write_token_ids(request.prefill, pack_token_ids(token_ids))
            return self._generate(request, timeout_s), detokenizer_factory(tokenizer, token_ids, options)

        return AsyncTextAnswer(start)

    def _tokenizer_chunks(self, request: GetTokenizerRequest, timeout_s: float | None) -> AsyncIterator[TokenizerChunk]:
        return self._stream(methods.GET_TOKENIZER, request, self._connection.timeout_s(timeout_s))

    async def _call(
        self, method: Method[Request, Response], request: Request, timeout_s: float | None = None
    ) -> Response:
        """Make a call with one response. `timeout_s` is its deadline; None for the client's default."""
        self._require_open()
        timeout_s = self._connection.timeout_s(timeout_s)
        metadata = self._connection.metadata(method, request)
        try:
            response: Response = await self._stubs[method](request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise self._connection.error_of(error, method, timeout_s) from None
        return response

    def _stream(
        self, method: Method[Request, Response], request: Request, timeout_s: float | None
    ) -> AsyncResponseStream[Response]:
        """Make a call with a stream of responses. `timeout_s` is its deadline; None for none."""
        self._require_open()
        metadata = self._connection.metadata(method, request)
        responses = self._stubs[method](request, timeout=timeout_s, metadata=metadata)
        return AsyncResponseStream(responses, lambda error: self._connection.error_of(error, method, timeout_s))

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("client: it has been closed; make another one")


class AsyncPublicPrefixClient:
    """The asyncio version of `PublicPrefixClient`; see `AsyncClient.public`."""

    def __init__(
        self, call: Callable[[Method[Any, Any], Any], Awaitable[Any]], served_tokenizer: AsyncServedTokenizer
    ) -> None:
        self._call = call
        self._served_tokenizer = served_tokenizer

    async def register(self, name: str, prefix: str | TokenIds, *, adapter: str = "") -> PublicPrefix:
        """Register a public prefix; see `PublicPrefixClient.register`."""
        token_ids = await self._served_tokenizer.token_ids(prefix)
        request = prompt_request(RegisterPublicPrefixRequest, token_ids, name=name, adapter=adapter)
        prefix_message: PublicPrefix = (await self._call(methods.REGISTER_PUBLIC_PREFIX, request)).public_prefix
        return prefix_message

    async def unregister(self, name: str) -> PublicPrefix:
        """Unregister a public prefix; see `PublicPrefixClient.unregister`."""
        request = make_request(UnregisterPublicPrefixRequest, name=name)
        prefix_message: PublicPrefix = (await self._call(methods.UNREGISTER_PUBLIC_PREFIX, request)).public_prefix
        return prefix_message

    async def list(self) -> ListPublicPrefixesResponse:
        """List the registered public prefixes; see `PublicPrefixClient.list`."""
        request = ListPublicPrefixesRequest()
        response: ListPublicPrefixesResponse = await self._call(methods.LIST_PUBLIC_PREFIXES, request)
        return response
