"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, overload

import grpc
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from radixkv.api.retention import Retention
from radixkv.service.client.access import Access, File
from radixkv.service.client.channel import Options, call_of, channel_options, channel_to, stubs, target, timeout
from radixkv.service.client.diagnosis import Diagnosis, proxy_variable
from radixkv.service.client.health import ServingStatus, health_check
from radixkv.service.client.prefix_key import PrefixKey
from radixkv.service.client.public_prefixes import PublicPrefixes
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
from radixkv.service.client.route_calls import RouteCalls
from radixkv.service.client.served_tokenizer import ServedTokenizer
from radixkv.service.client.streams import AnswerStream
from radixkv.service.client.text_answers import TextAnswer, new_text
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.token_ids import TokenIds
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
from radixkv.v1.prefill_pb2 import GenerateResponse, PrefillResponse, ProbeResponse


class Client(RouteCalls):
    """Blocking calls over one connection. Safe to share between threads.

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
        """Connect lazily; nothing is sent before the first call.

        Args:
            address: `HOST:PORT`.
            timeout_s: deadline of every call that gives none of its own; None for no deadline.
            retries: number of further attempts, 0 to 4, after an attempt that fails with UNAVAILABLE; gRPC waits up to
                0.1 s before the first and twice as long before each next. The deadline covers all attempts. Tried again
                are `prefill`, `generate` before its first tokens, `probe`, `renew`, `retain`, `stats`, `segments`,
                `adapters`, `public.list` and `tokenizer`, and no other calls.
            prefix_key_tokens: calls with a prompt carry the header `x-prefix-key`, a digest of tenant, adapter, salt
                and this number of first tokens; 0 for no header. A proxy that hashes it sends prompts that begin alike
                to one server.
            tls_ca: PEM file with the authorities that signed the service's certificate; None for no TLS.
            token: a bearer token, which says who the caller is. Needs `tls_ca`, unless the service is on this machine.
            certificate, key: PEM files of the caller's own certificate and its private key, for mutual TLS.
            options: further gRPC channel options; they win over ours.

        Raises:
            OSError: a file can't be read.
            TypeError: the address is no text.
            ValueError: the address has no port from 1 to 65535, `timeout_s` is not a positive number, `retries` or
                `prefix_key_tokens` is out of range, or the credentials can't be used like this.
        """
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
        self._channel = channel_to(address, self._access.credentials, channel_options(options, retries))
        self._prefill, self._cache, self._model, self._events = stubs(self._channel)
        self._fleet = FleetServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._served = ServedTokenizer(self._model, self._chunks)
        self.public = PublicPrefixes(self._cache, self._ask, self._served)
        self._check_health = health_check(self._channel)

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
        """Prefill one prompt, reusing what is cached.

        Args:
            prompt: text; or token ids: a sequence of ints, an integer numpy array, an `array.array` or a torch tensor.
                The tokenizer of the served model encodes text and adds the special tokens that the model expects
                around it. The first text loads the tokenizer, see `tokenizer`; later ones need no further call.
            timeout_s: deadline of this call, and of those that fetch the tokenizer.
            options: `PrefillOptions` lists them.

        Raises:
            MissingPackage: the prompt is text, and the extra `text` is not installed.
            TypeError, ValueError: `prompt` is neither text nor uint32 numbers, or an option is unknown, has a wrong
                type or does not fit; no prompt was sent.
            ServiceError: the service refused the request, or can't be reached; the subclass says which.
        """
        request = prefill_request(self._served.token_ids(prompt, timeout_s), options)
        answer: PrefillResponse = self._ask(
            self._prefill.Prefill, request, self._access.metadata_of(request), timeout_s
        )
        return answer

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
        """Continue a prompt. The generated tokens are cached for the next turn.

        Args:
            prompt: text or token ids, as in `prefill`.
            timeout_s: deadline of the whole call.
            options: `GenerateOptions` lists them.

        Returns:
            For text, a `TextAnswer`: iterate over it for `TextChunk`s with the new text as it comes, or call its `read`
            for the whole text. For token ids, an iterator over messages with new tokens; the first one has the usage of
            the prompt, the last one is `finished` and says why. Closing either cancels the request.

        Raises:
            TypeError, ValueError: as `prefill`; nothing was sent.
            ServiceError: as `prefill`, also while tokens are read.
        """
        if not isinstance(prompt, str):
            return self._generate(prompt, timeout_s, options)
        tokenizer = self._served.get(timeout_s)
        return self._answer(tokenizer, tokenizer.encode(prompt), timeout_s, options)

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
        """Answer a conversation, put into the model's chat template. What earlier turns computed is reused.

        Args:
            messages: in the form of OpenAI's API, such as `[{"role": "user", "content": "Hi"}]`.
            tools, documents, chat_template_kwargs: for the template; see `Tokenizer.encode_chat`.
            timeout_s: deadline of the whole call, and of those that fetch the tokenizer.
            options: `GenerateOptions` lists them.

        Returns:
            The answer, as `generate` returns it for text.

        Raises:
            MissingPackage: the extra `text` is not installed.
            TypeError, ValueError: the model has no chat template, the template refuses the messages, or an option does
                not fit; no prompt was sent.
            ServiceError: as `generate`.
        """
        tokenizer = self._served.get(timeout_s)
        prompt = tokenizer.encode_chat(
            messages, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
        )
        return self._answer(tokenizer, prompt, timeout_s, options)

    def probe(self, prompt: str | TokenIds, *, tenant: str = "", adapter: str = "", salt: str = "") -> ProbeResponse:
        """Ask how many tokens a prefill of this prompt would reuse now. Changes nothing. Raises like `prefill`."""
        request = probe_request(self._served.token_ids(prompt), tenant=tenant, adapter=adapter, salt=salt)
        answer: ProbeResponse = self._ask(self._prefill.Probe, request, self._access.metadata_of(request))
        return answer

    def retain(
        self, prompt: str | TokenIds, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> RetainResponse:
        """Set the priority of a cached range, whatever it was before. Raises like `prefill`."""
        request = retain_request(self._served.token_ids(prompt), retention, tenant=tenant, adapter=adapter, salt=salt)
        answer: RetainResponse = self._ask(self._cache.Retain, request, self._access.metadata_of(request))
        return answer

    def purge(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        salt: str | None = None,
        everything: bool = False,
    ) -> PurgeResponse:
        """Forget all namespaces with these names; None matches any name.

        Raises:
            ValueError: neither a name nor `everything` is given, or both are.
            ServiceError: the service refused the request, or can't be reached.
        """
        request = purge_request(tenant, adapter, salt, everything=everything)
        answer: PurgeResponse = self._ask(self._cache.Purge, request)
        return answer

    def segments(
        self,
        *,
        tenant: str | None = None,
        page_size: int | None = None,
        page_token: str = "",
        hottest_first: bool = False,
        store: str = "",
    ) -> ListSegmentsResponse:
        """List what is cached, a page at a time; never its tokens. Raises like `prefill`.

        Args:
            tenant: whose segments; None for everybody's.
            page_size: 1 to 1,000, 100 without a number. A page may have fewer segments although others follow.
            page_token: `next_page_token` of the answer before, which is empty after the last page.
            hottest_first: the hottest up to 256 in one page; see `HotWalk` for what is exact.
            store: lists what a store below the device, such as `host`, holds of each namespace.
        """
        request = segments_request(tenant, page_size, page_token, store, hottest_first=hottest_first)
        answer: ListSegmentsResponse = self._ask(self._cache.ListSegments, request)
        return answer

    def stats(self, *, max_tenants: int | None = None, tenant: str | None = None) -> StatsResponse:
        """Read the contents of the cache and the counters of the service.

        Args:
            max_tenants: this number of tenants, the largest, at most 128; None for 100.
            tenant: only what this tenant may know; None for all, or for the caller's own with a tenant's credential.
        """
        answer: StatsResponse = self._ask(self._cache.Stats, StatsRequest(max_tenants=max_tenants, tenant=tenant))
        return answer

    def load_adapter(self, name: str, path: str) -> LoadAdapterResponse:
        """Let a name stand for an adapter in a directory of the server. Requests before keep what it stood for.

        Raises:
            InvalidArgument: the name, the path or a file there is wrong.
            ResourceExhausted: `model.max_adapters` are loaded or draining.
            Unimplemented: the server has no adapters, or no directory for them.
            PermissionDenied: the caller is not an admin.
        """
        answer: LoadAdapterResponse = self._ask(self._cache.LoadAdapter, LoadAdapterRequest(name=name, path=path))
        return answer

    def unload_adapter(self, name: str) -> None:
        """Let a name stand for nothing. What was cached with its adapter is freed, unless another name has it.

        Raises:
            NotFound: no adapter has this name.
            PermissionDenied: the caller is not an admin.
        """
        self._ask(self._cache.UnloadAdapter, UnloadAdapterRequest(name=name))

    def adapters(self) -> ListAdaptersResponse:
        """List the adapters: what each name stands for, its memory, its requests and cached tokens; and what drains.

        Raises:
            PermissionDenied: the caller is neither an admin nor a reader.
        """
        answer: ListAdaptersResponse = self._ask(self._cache.ListAdapters, ListAdaptersRequest())
        return answer

    def drain(self) -> None:
        """End the service as SIGTERM does: it refuses new requests, finishes running ones and exits. Returns at once.

        Raises:
            PermissionDenied: the caller is not an admin.
        """
        self._ask(self._cache.Drain, DrainRequest())

    def health(self, service: str = "", *, timeout_s: float | None = None) -> ServingStatus:
        """Ask whether the service accepts requests. Needs no credential.

        Args:
            service: name of one gRPC service, such as `radixkv.v1.PrefillService`; empty for the server.
            timeout_s: deadline of this call.

        Raises:
            NotFound: the server has no service of this name.
            Unimplemented: the server was installed without gRPC's health service.
            Unavailable: the server can't be reached.
        """
        status: ServingStatus = self._ask(self._check_health, StringValue(value=service), timeout_s=timeout_s)
        return status

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the served model.

        The service is asked for the digest of its files, each time. Only a tokenizer with another digest is loaded, and
        only files that no process has kept are fetched. Prompts that are text use the tokenizer that was returned last,
        or fetch it themselves: call this after the service has begun to serve another model.

        Raises:
            MissingPackage: the extra `text` is not installed.
            ValueError: the answer is no zip of tokenizer files with the digest that it has, or can't be loaded.
            NotFound: the served model has no tokenizer.
        """
        return self._served.load()

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False, timeout_s: float | None = None
    ) -> Iterator[EventBatch]:
        """Follow what is cached, until the service ends. Leaving the loop ends the call.

        Args:
            start_sequence_number: the last that was read; what follows it comes; 0: first a `snapshot` of all blocks.
            stores: tell also what the stores below the device have: events with a `tier`.
            timeout_s: deadline of this call; the client's own does not count.

        Raises:
            ValueError: the number is out of range.
            OutOfRange, DataLoss: begin again from 0.
            Unavailable: the service ended.
        """
        request = SubscribeRequest(start_sequence_number=start_sequence_number, stores=stores)
        return self._stream(self._events.Subscribe, request, timeout(timeout_s))

    def _generate(self, token_ids: TokenIds, timeout_s: float | None, options: GenerateOptions) -> AnswerStream:
        request = generate_request(token_ids, options)
        metadata = self._access.metadata_of(request.prefill)
        return self._stream(self._prefill.Generate, request, self._timeout(timeout_s), metadata)

    def _answer(
        self, tokenizer: Tokenizer, prompt_ids: list[int], timeout_s: float | None, options: GenerateOptions
    ) -> TextAnswer:
        responses = self._generate(prompt_ids, timeout_s, options)
        return TextAnswer(responses, new_text(tokenizer, prompt_ids, options))

    def _ask(self, call: Any, request: Message, metadata: Any = None, timeout_s: float | None = None) -> Any:
        self._require_open()
        timeout_s = self._timeout(timeout_s)
        try:
            return call(request, timeout=timeout_s, metadata=metadata or self._access.metadata)
        except grpc.RpcError as error:
            raise self._diagnosis.error_of(error, call_of(request), timeout_s) from None

    def _stream(self, call: Any, request: Message, timeout_s: float | None, metadata: Any = None) -> AnswerStream:
        """Make a call with several answers. `timeout_s` is its deadline, whatever that of the client is."""
        self._require_open()
        answers = call(request, timeout=timeout_s, metadata=metadata or self._access.metadata)
        return AnswerStream(answers, lambda error: self._diagnosis.error_of(error, call_of(request), timeout_s))

    def _chunks(self, call: Any, request: Message, timeout_s: float | None) -> AnswerStream:
        return self._stream(call, request, self._timeout(timeout_s))

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout(timeout_s)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("client: it has been closed; make another one")
