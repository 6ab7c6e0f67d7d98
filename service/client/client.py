"""The blocking client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from radixkv.service.client.response_stream import ResponseStream
from radixkv.service.client.served_tokenizer import ServedTokenizer
from radixkv.service.client.text_answers import TextAnswer, detokenizer_factory
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.token_ids import TokenIds
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
    GenerateResponse,
    PrefillResponse,
    ProbeRequest,
    ProbeResponse,
    ReleaseRequest,
    ReleaseResponse,
    RenewRequest,
    RenewResponse,
)


class Client:
    """Blocking calls over one connection. Safe to share between threads.

    Attributes:
        public: calls about public prefixes, which the prompts of all tenants share.
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
        """Create a client. It connects with the first call.

        Args:
            address: `HOST:PORT` of the server.
            timeout_s: default deadline of calls in seconds; None for no deadline.
            retries: maximum number of retries of a call that fails with UNAVAILABLE, 0 to 4. gRPC waits about 0.1 s
                before the first retry and twice as long before each further one; the deadline covers all attempts. Only
                idempotent calls are retried: `prefill`, `generate` before its first tokens, `probe`, `renew`,
                `retain`, `explain`, `stats`, `statement`, `diagnose`, `segments`, `adapters`, `public.list` and
                `tokenizer`.
            prefix_key_tokens: number of first tokens of a prompt that its header `x-prefix-key` covers; 0 for no
                header. The header is a digest of tenant, adapter, salt and these tokens. A proxy that hashes it sends
                prompts with a common prefix to the same server.
            tls_ca: PEM file with the authorities that may have signed the server's certificate; None for a connection
                without TLS.
            token: bearer token that authenticates the client. Requires `tls_ca`, unless the server is on this machine.
            certificate, key: PEM files of the client's own certificate and its private key, for mutual TLS.
            options: gRPC channel options, which override the options that the client sets by default.

        Raises:
            OSError: a file can't be read.
            TypeError: the address is not a string.
            ValueError: the address has no port from 1 to 65535, `timeout_s`, `retries` or `prefix_key_tokens` is out of
                range, or the credentials are malformed or do not fit together.
        """
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
        self._channel = self._connection.open()
        self._stubs = {method: method.bind(self._channel) for method in METHODS}
        self._served_tokenizer = ServedTokenizer(self._tokenizer_chunks)
        self.public = PublicPrefixClient(self._call, self._served_tokenizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and cancel calls in flight. Closing again does nothing."""
        self._is_closed = True
        self._channel.close()

    def prefill(
        self, prompt: str | TokenIds, *, timeout_s: float | None = None, **options: Unpack[PrefillOptions]
    ) -> PrefillResponse:
        """Prefill one prompt, reusing the cached part of it.

        Args:
            prompt: text, or token ids: a sequence of ints, an integer numpy array, an `array.array` or a torch tensor.
                Text is encoded by the tokenizer of the served model, with the special tokens that the model expects.
                The first text loads the tokenizer, see `tokenizer`; later ones need no further call.
            timeout_s: deadline of this call in seconds, and of the calls that fetch the tokenizer.
            options: see `PrefillOptions`.

        Raises:
            MissingPackage: the prompt is text, and the extra `text` is not installed.
            TypeError, ValueError: `prompt` is neither text nor uint32 numbers, or an option is unknown or has a wrong
                type or range; no prompt was sent.
            ServiceError: the call failed; the subclass says how.
        """
        token_ids = self._served_tokenizer.token_ids(prompt, timeout_s)
        return self._call(methods.PREFILL, prefill_request(token_ids, options), timeout_s)

    @overload
    def generate(
        self, prompt: str, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> TextAnswer: ...

    @overload
    def generate(
        self, prompt: TokenIds, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[GenerateResponse]: ...

    def generate(
        self, prompt: str | TokenIds, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> TextAnswer | Iterator[GenerateResponse]:
        """Generate a completion of a prompt. The generated tokens are cached for the next turn.

        Args:
            prompt: text or token ids, as in `prefill`.
            timeout_s: deadline of the whole call in seconds, and of the calls that fetch the tokenizer.
            options: see `GenerateOptions`.

        Returns:
            For text, a `TextAnswer`: iterate over it for `TextChunk`s as they arrive, or call `read` for the whole
            text. For token ids, an iterator over responses with new tokens; the first one of each completion has the
            usage of the prompt, and the last one is `finished` and has the finish reason. Closing either cancels the
            request.

        Raises:
            MissingPackage, TypeError, ValueError: as `prefill`; no prompt was sent.
            ServiceError: as `prefill`, also while tokens are read.
        """
        if not isinstance(prompt, str):
            return self._generate(prompt, timeout_s, options)
        tokenizer = self._served_tokenizer.get(timeout_s)
        return self._generate_text(tokenizer, tokenizer.encode(prompt), timeout_s, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> TextAnswer:
        """Generate the next message of a conversation, formatted by the model's chat template.

        Args:
            messages: in the format of OpenAI's API, such as `[{"role": "user", "content": "Hi"}]`.
            tools, documents, chat_template_kwargs: arguments of the chat template; see `Tokenizer.encode_chat`.
            timeout_s: deadline of the whole call in seconds, and of the calls that fetch the tokenizer.
            options: see `GenerateOptions`.

        Returns:
            The completion, as `generate` returns it for text.

        Raises:
            MissingPackage: the extra `text` is not installed.
            TypeError, ValueError: the model has no chat template, the template rejects the messages, or an option is
                unknown or has a wrong type or range; no prompt was sent.
            ServiceError: as `generate`.
        """
        tokenizer = self._served_tokenizer.get(timeout_s)
        prompt = tokenizer.encode_chat(
            messages, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
        )
        return self._generate_text(tokenizer, prompt, timeout_s, options)

    def probe(self, prompt: str | TokenIds, *, tenant: str = "", adapter: str = "", salt: str = "") -> ProbeResponse:
        """Return how many tokens a prefill of this prompt would reuse now. Changes nothing. Raises like `prefill`."""
        token_ids = self._served_tokenizer.token_ids(prompt)
        request = prompt_request(ProbeRequest, token_ids, tenant=tenant, adapter=adapter, salt=salt)
        return self._call(methods.PROBE, request)

    def release(self, lease_id: str, *, tenant: str = "") -> ReleaseResponse:
        """Release a lease that `prefill(hold_lease=True)` returned, so that the prompt's blocks may be evicted again.

        Args:
            lease_id: from the response.
            tenant: the tenant of the lease. If empty, it is the tenant of the credential, or the unnamed tenant.

        Returns:
            An empty response.

        Raises:
            TypeError, ValueError: an argument is not a string in UTF-8; nothing was sent.
            NotFound: this tenant does not hold this lease, or the lease has ended.
            ServiceError: the call failed; the subclass says how.
        """
        return self._call(methods.RELEASE, make_request(ReleaseRequest, lease_id=lease_id, tenant=tenant))

    def renew(self, lease_id: str, *, tenant: str = "") -> RenewResponse:
        """Restart the time to live of a held lease, `engine.held_lease_ttl_s` in the server's configuration.

        Takes the arguments of `release` and raises the same errors.

        Returns:
            `lease_expires_at`: when the lease ends unless it is renewed again.
        """
        return self._call(methods.RENEW, make_request(RenewRequest, lease_id=lease_id, tenant=tenant))

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
    ) -> Iterator[FetchKVResponse]:
        """Read the K/V of a lease as a stream of `FetchKVResponse`. The server sends them as fast as they are read.

        Args:
            lease_id, epoch: from the response that returned the lease; an epoch of 0 matches any.
            tenant: the tenant of the lease, as in `release`.
            first_block: index of the first block to send.
            first_layer, num_layers: send only these layers of each block; 0 layers means all from the first one on.
            stores: shared stores that the caller can read too. Blocks in them are sent as handles. Can't be combined
                with `first_layer` and `num_layers`.
            timeout_s: deadline of the whole call; None for the client's.

        Raises:
            NotFound: the lease has ended, or the server has restarted.
            InvalidArgument: the lease has no such block, or the model no such layers.
            Unimplemented: `transfer.serve` is not set on the server, and its `transfer.role` is not `prefill`.
        """
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

    def retain(
        self, prompt: str | TokenIds, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> RetainResponse:
        """Set the retention priority of a cached range, replacing its previous one. Raises like `prefill`."""
        token_ids = self._served_tokenizer.token_ids(prompt)
        request = retain_request(token_ids, retention, tenant=tenant, adapter=adapter, salt=salt)
        return self._call(methods.RETAIN, request)

    def hint(
        self,
        actions: Sequence[Mapping[str, Any]],
        prompt: str | TokenIds | None = None,
        *,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
    ) -> HintResponse:
        """Apply hints about the future use of cached tokens, and return the outcome of each. Raises like `prefill`.

        Args:
            actions: dicts with `action_type`, `payload` and perhaps `action_id`; `KvHintsEnvelope` in hints.proto has
                the table of actions.
            prompt: the prompt that the actions address; not needed if each payload has `session_id`, `adapter` or
                `salt`.
        """
        token_ids = None if prompt is None else self._served_tokenizer.token_ids(prompt)
        request = hint_request(actions, token_ids, tenant=tenant, adapter=adapter, salt=salt)
        return self._call(methods.HINT, request)

    def explain(
        self,
        prompt: str | TokenIds,
        *,
        segments: Sequence[tuple[str, int]] = (),
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        omit_cached_text: bool = False,
    ) -> ExplainResponse:
        """Explain where and why a prompt diverges from what is cached in its namespace. Computes and changes nothing.

        A prompt can be explained before it is sent, and afterwards until another request reuses the tokens that it
        cached.

        Args:
            prompt: text or token ids, as in `prefill`.
            segments: names of parts of the prompt, each with the position after its last token, in order, such as
                `[("system", 120), ("tools", 900)]`; at most 1,024. The response names the one in which the prompt
                diverges from the cached branch.
            tenant, adapter, salt: the namespace, as in `prefill`. Other namespaces are never compared.
            omit_cached_text: leave the tokens and the text of the cached branch out, as the server does for admins.

        Returns:
            `left_at_token`, and in `difference` what differs there (its `kind` is a `DifferenceKind`), how both sides
            continue, and how many more tokens would be reused without it. `difference` is absent if nothing else is
            cached at that position.

        Raises:
            MissingPackage, TypeError, ValueError: as `prefill`, also for segments; no prompt was sent.
            InvalidArgument: the segments are not in order.
            ResourceExhausted: the tenant exceeds its rate of calls, or too many explanations wait.
            ServiceError: the call failed; the subclass says how.
        """
        request = explain_request(
            self._served_tokenizer.token_ids(prompt),
            segments,
            tenant=tenant,
            adapter=adapter,
            salt=salt,
            omit_cached_text=omit_cached_text,
        )
        return self._call(methods.EXPLAIN, request)

    def end_session(self, session_id: str, *, tenant: str = "") -> EndSessionResponse:
        """End a session: tokens that only it has used are evicted before all others. Raises like `prefill`."""
        request = make_request(EndSessionRequest, tenant=tenant, session_id=session_id)
        return self._call(methods.END_SESSION, request)

    def purge(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        salt: str | None = None,
        everything: bool = False,
    ) -> PurgeResponse:
        """Drop everything that is cached for a tenant, an adapter or a salt; None matches any.

        With a tenant's credential, None as `tenant` means the tenant of the credential, also with `everything`.

        Raises:
            ValueError: both a name and `everything` were passed, or neither.
            ServiceError: the call failed; the subclass says how.
        """
        return self._call(methods.PURGE, purge_request(tenant, adapter, salt, everything=everything))

    def segments(
        self,
        *,
        tenant: str | None = None,
        page_size: int | None = None,
        page_token: str = "",
        hottest_first: bool = False,
        store: str = "",
        session_id: str = "",
    ) -> ListSegmentsResponse:
        """List the cached segments page by page. Token ids are never returned. Raises like `prefill`.

        Args:
            tenant: list segments of this tenant. None for all tenants, or with a tenant's credential, for the tenant of
                the credential.
            page_size: 1 to 1,000; None for 100. A page may have fewer segments, even if more pages follow.
            page_token: `next_page_token` of the previous response; on the last page it is empty.
            hottest_first: return the `page_size` hottest segments in one page; `page_size` is then at most 256.
            store: list the blocks of each namespace in this tier, such as `host`, instead of segments on the device.
            session_id: list only segments that no other session than this one of `tenant` has used, in one page of at
                most 1,000.
        """
        request = make_request(
            ListSegmentsRequest,
            tenant=tenant,
            page_size=page_size,
            page_token=page_token,
            hottest_first=hottest_first,
            store=store,
            session_id=session_id,
        )
        return self._call(methods.LIST_SEGMENTS, request)

    def stats(
        self, *, max_tenants: int | None = None, tenant: str | None = None, max_sessions: int = 0
    ) -> StatsResponse:
        """Return the contents of the cache and the counters of the server.

        Args:
            max_tenants: maximum number of tenants to list, those with the most blocks; None for 100. At most 128 are
                listed, even if it is larger.
            tenant: return only the statistics that this tenant may see. None for all statistics, or with a tenant's
                credential, for those that the tenant of the credential may see.
            max_sessions: number of sessions to list, at most 100. Those used most recently are listed.
        """
        return self._call(
            methods.STATS, make_request(StatsRequest, max_tenants=max_tenants, tenant=tenant, max_sessions=max_sessions)
        )

    def statement(
        self, *, since: str = "", until: str = "", tenant: str | None = None, by_day: bool = False
    ) -> StatementResponse:
        """Return what tenants used in a range of days: tokens, token-seconds on the device and in tiers, evictions.

        Args:
            since: the first day, such as `2026-11-01`, or the month of the first days, such as `2026-11`, in UTC; by
                default the first day of the month of the last day.
            until: the last day, or the month of the last days; by default today. A range has at most 400 days.
            tenant: return only the lines of this tenant. None for all tenants, or with a tenant's credential, for the
                tenant of the credential.
            by_day: return a line for each day instead of for each month.

        Raises:
            InvalidArgument: a day is malformed, or the range is too long.
            ResourceExhausted: too many statements wait.
            Unimplemented: `server.statement_path` is not set.
            ServiceError: the call failed; the subclass says how.
        """
        return self._call(
            methods.STATEMENT, make_request(StatementRequest, since=since, until=until, tenant=tenant, by_day=by_day)
        )

    def diagnose(
        self, *, tenant: str | None = None, max_causes: int = 10, omit_cached_text: bool = False
    ) -> DiagnoseResponse:
        """Return why recent prompts were not reused: the tokens that a sample of the misses lost, grouped by cause.

        Args:
            tenant: return only the misses of this tenant. None for all tenants, or with a tenant's credential, for the
                tenant of the credential.
            max_causes: number of causes to list, at most 100.
            omit_cached_text: leave the samples out, as the server does for admins and readers.

        Raises:
            InvalidArgument: `max_causes` is too large.
            Unimplemented: `server.diagnosed_share` is 0, or `transfer.role` is `decode`.
            ServiceError: the call failed; the subclass says how.
        """
        return self._call(
            methods.DIAGNOSE,
            make_request(DiagnoseRequest, tenant=tenant, max_causes=max_causes, omit_cached_text=omit_cached_text),
        )

    def load_adapter(self, name: str, path: str) -> LoadAdapterResponse:
        """Load a LoRA adapter, or replace the one with this name. Requests that already run keep the previous weights.

        Args:
            name: name of the adapter in requests.
            path: directory on the server inside `model.adapter_directory`, as a relative or an absolute path.

        Raises:
            InvalidArgument: the name, the path or a file there is wrong.
            ResourceExhausted: `model.max_adapters` adapters are loaded, or twice as many are loaded or draining.
            Unimplemented: the server has no adapters, or no directory for them.
            PermissionDenied: the client is not an admin.
        """
        return self._call(methods.LOAD_ADAPTER, make_request(LoadAdapterRequest, name=name, path=path))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that already use it continue.

        When they have ended, the tokens cached with it are freed, unless the adapter is also loaded under another name.

        Raises:
            NotFound: no adapter has this name.
            PermissionDenied: the client is not an admin.
        """
        self._call(methods.UNLOAD_ADAPTER, make_request(UnloadAdapterRequest, name=name))

    def adapters(self) -> ListAdaptersResponse:
        """List the adapters that are loaded or draining, with their memory, requests and cached tokens.

        Raises:
            PermissionDenied: the client is neither an admin nor a reader.
        """
        return self._call(methods.LIST_ADAPTERS, ListAdaptersRequest())

    def drain(self) -> None:
        """Shut the server down as SIGTERM does: it refuses new requests, finishes running ones and exits.

        Returns at once.

        Raises:
            PermissionDenied: the client is not an admin.
        """
        self._call(methods.DRAIN, DrainRequest())

    def health(self, service: str = "", *, timeout_s: float | None = None) -> ServingStatus:
        """Return whether the server accepts requests. Needs no credential.

        Args:
            service: name of one gRPC service, such as `radixkv.v1.PrefillService`; empty for the whole server.
            timeout_s: deadline of this call.

        Raises:
            NotFound: the server has no service of this name.
            Unimplemented: the server has no gRPC health service.
            Unavailable: the server can't be reached.
        """
        response = self._call(methods.HEALTH_CHECK, StringValue(value=service), timeout_s)
        return ServingStatus(response.value)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the served model.

        Each call asks the server for the digest of the tokenizer's files. They are fetched only if they are not in this
        machine's cache directory, and loaded only if the digest has changed. Prompts that are text use the tokenizer
        that was loaded last, or load it. Call this method when the server may serve another model than before.

        Raises:
            MissingPackage: the extra `text` is not installed.
            ValueError: the response is not a zip of tokenizer files with its digest, or they can't be loaded.
            OSError: the files can't be stored, not even in a temporary directory.
            NotFound: the served model has no tokenizer.
        """
        return self._served_tokenizer.load()

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False, timeout_s: float | None = None
    ) -> Iterator[EventBatch]:
        """Subscribe to cache events until the server stops. Leaving the loop ends the call.

        Args:
            start_sequence_number: number of the last batch that was read, after which the stream continues; 0 to begin
                with a `snapshot` of all cached blocks.
            stores: also return the events of tiers below the device; such events have a `tier`.
            timeout_s: deadline of this call in seconds; the client's default does not apply.

        Raises:
            ValueError: the number is out of range.
            OutOfRange, DataLoss: subscribe again from 0.
            Unavailable: the server has stopped.
        """
        request = make_request(SubscribeRequest, start_sequence_number=start_sequence_number, stores=stores)
        return self._stream(methods.SUBSCRIBE, request, require_timeout(timeout_s))

    def route(
        self,
        prompt: str | TokenIds,
        *,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        avoid: Iterable[str] = (),
    ) -> RouteResponse:
        """Ask a fleet which replica should get a prompt. Call it once per request: the fleet counts each call as load.

        Args:
            prompt, tenant, adapter, salt: as in the request that will be sent to the replica.
            avoid: addresses of replicas that must not be chosen, such as one that just failed.

        Raises:
            MissingPackage, TypeError, ValueError: as `prefill`; no prompt was sent.
            Unavailable: no replica is left.
            Unimplemented: the server is a single server, not a fleet.
        """
        token_ids = self._served_tokenizer.token_ids(prompt)
        request = prompt_request(RouteRequest, token_ids, tenant=tenant, adapter=adapter, salt=salt, avoid=avoid)
        return self._call(methods.ROUTE, request)

    def _generate(
        self, token_ids: TokenIds, timeout_s: float | None, options: GenerateOptions
    ) -> ResponseStream[GenerateResponse]:
        request = generate_request(token_ids, options)
        return self._stream(methods.GENERATE, request, self._connection.timeout_s(timeout_s))

    def _generate_text(
        self, tokenizer: Tokenizer, token_ids: list[int], timeout_s: float | None, options: GenerateOptions
    ) -> TextAnswer:
        responses = self._generate(token_ids, timeout_s, options)
        return TextAnswer(responses, detokenizer_factory(tokenizer, token_ids, options))

    def _tokenizer_chunks(self, request: GetTokenizerRequest, timeout_s: float | None) -> Iterator[TokenizerChunk]:
        return self._stream(methods.GET_TOKENIZER, request, self._connection.timeout_s(timeout_s))

    def _call(self, method: Method[Request, Response], request: Request, timeout_s: float | None = None) -> Response:
        """Make a call with one response. `timeout_s` is its deadline; None for the client's default."""
        self._require_open()
        timeout_s = self._connection.timeout_s(timeout_s)
        metadata = self._connection.metadata(method, request)
        try:
            response: Response = self._stubs[method](request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise self._connection.error_of(error, method, timeout_s) from None
        return response

    def _stream(
        self, method: Method[Request, Response], request: Request, timeout_s: float | None
    ) -> ResponseStream[Response]:
        """Make a call with a stream of responses. `timeout_s` is its deadline; None for none."""
        self._require_open()
        metadata = self._connection.metadata(method, request)
        responses = self._stubs[method](request, timeout=timeout_s, metadata=metadata)
        return ResponseStream(responses, lambda error: self._connection.error_of(error, method, timeout_s))

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("client: it has been closed; make another one")


class PublicPrefixClient:
    """The calls about public prefixes, such as system prompts, which all tenants share; see `Client.public`.

    Args:
        call: makes a call, see `Client._call`.
        served_tokenizer: the tokenizer of the served model.
    """

    def __init__(self, call: Callable[[Method[Any, Any], Any], Any], served_tokenizer: ServedTokenizer) -> None:
        self._call = call
        self._served_tokenizer = served_tokenizer

    def register(self, name: str, prefix: str | TokenIds, *, adapter: str = "") -> PublicPrefix:
        """Register a public prefix. Returns when its K/V are computed.

        Args:
            name: name of the prefix, which no other public prefix has.
            prefix: text or token ids, at least one block of tokens; see `Client.prefill`. A prompt that continues the
                text may be tokenized differently where the prefix ends, so that the last one or two tokens are not
                shared.
            adapter: name of a loaded adapter; empty for the base model.

        Raises:
            MissingPackage, TypeError, ValueError: as `Client.prefill`; no prefix was sent.
            ServiceError: the call failed; the subclass says how.
        """
        token_ids = self._served_tokenizer.token_ids(prefix)
        request = prompt_request(RegisterPublicPrefixRequest, token_ids, name=name, adapter=adapter)
        prefix_message: PublicPrefix = self._call(methods.REGISTER_PUBLIC_PREFIX, request).public_prefix
        return prefix_message

    def unregister(self, name: str) -> PublicPrefix:
        """Unregister a public prefix, so that new requests do not use it, and return it. Raises like `register`."""
        request = make_request(UnregisterPublicPrefixRequest, name=name)
        prefix_message: PublicPrefix = self._call(methods.UNREGISTER_PUBLIC_PREFIX, request).public_prefix
        return prefix_message

    def list(self) -> ListPublicPrefixesResponse:
        """List the registered public prefixes. Raises like `register`."""
        response: ListPublicPrefixesResponse = self._call(methods.LIST_PUBLIC_PREFIXES, ListPublicPrefixesRequest())
        return response
