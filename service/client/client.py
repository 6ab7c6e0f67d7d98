"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import numpy.typing as npt
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from radixkv.api.retention import Retention
from radixkv.service.client.access import Access, File
from radixkv.service.client.channel import Options, channel_options, channel_to, stubs, target, timeout
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
from radixkv.service.client.streams import AnswerStream
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
        self._channel = channel_to(address, self._access.credentials, channel_options(options, retries))
        self._prefill, self._cache, self._model, self._events = stubs(self._channel)
        self._fleet = FleetServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._check_health = health_check(self._channel)
        self.public = PublicPrefixes(self._cache, self._ask)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and cancel calls in flight. Closing again does nothing."""
        self._channel.close()

    def prefill(
        self, token_ids: npt.ArrayLike, *, timeout_s: float | None = None, **options: Unpack[PrefillOptions]
    ) -> PrefillResponse:
        """Prefill one prompt, reusing what is cached.

        Args:
            token_ids: the prompt; a sequence of ints, an integer numpy array, an `array.array` or a torch tensor.
            timeout_s: deadline of this call.
            options: `PrefillOptions` lists them.

        Raises:
            TypeError, ValueError: `token_ids` is no run of uint32 numbers, or an option is unknown, has a wrong type or
                does not fit; nothing was sent.
            grpc.RpcError: the service refused, or can't be reached.
        """
        request = prefill_request(token_ids, options)
        answer: PrefillResponse = self._ask(
            self._prefill.Prefill, request, self._access.metadata_of(request), timeout_s
        )
        return answer

    def generate(
        self, token_ids: npt.ArrayLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[GenerateResponse]:
        """Continue a prompt, token by token. The generated tokens are cached for the next turn.

        Args:
            token_ids: the prompt, as in `prefill`.
            timeout_s: deadline of the whole call.
            options: `GenerateOptions` lists them.

        Yields:
            New tokens as they come. The first answer has the usage of the prompt; the last one is `finished` and says
            why. Closing the iterator cancels the request.

        Raises:
            TypeError, ValueError: as `prefill`; nothing was sent.
            grpc.RpcError: the service refused, or can't be reached; also while tokens are read.
        """
        request = generate_request(token_ids, options)
        metadata = self._access.metadata_of(request.prefill)
        return AnswerStream(self._prefill.Generate(request, timeout=self._timeout(timeout_s), metadata=metadata))

    def probe(self, token_ids: npt.ArrayLike, *, tenant: str = "", adapter: str = "", salt: str = "") -> ProbeResponse:
        """Ask how many tokens a prefill of this prompt would reuse now. Changes nothing. Raises like `prefill`."""
        request = probe_request(token_ids, tenant=tenant, adapter=adapter, salt=salt)
        answer: ProbeResponse = self._ask(self._prefill.Probe, request, self._access.metadata_of(request))
        return answer

    def retain(
        self, token_ids: npt.ArrayLike, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> RetainResponse:
        """Set the priority of a cached range, whatever it was before. Raises like `prefill`."""
        request = retain_request(token_ids, retention, tenant=tenant, adapter=adapter, salt=salt)
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
            grpc.RpcError: the service refused, or can't be reached.
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
            grpc.RpcError: INVALID_ARGUMENT: the name, the path or a file there is wrong. RESOURCE_EXHAUSTED: as many
                are loaded, or drain, as may. UNIMPLEMENTED: the server has no adapters, or no directory for them.
                PERMISSION_DENIED: the caller is no admin.
        """
        answer: LoadAdapterResponse = self._ask(self._cache.LoadAdapter, LoadAdapterRequest(name=name, path=path))
        return answer

    def unload_adapter(self, name: str) -> None:
        """Let a name stand for nothing. What was cached with its adapter is freed, unless another name has it.

        Raises:
            grpc.RpcError: NOT_FOUND: the name stands for no adapter. PERMISSION_DENIED: the caller is no admin.
        """
        self._ask(self._cache.UnloadAdapter, UnloadAdapterRequest(name=name))

    def adapters(self) -> ListAdaptersResponse:
        """List the adapters: what each name stands for, its memory, its requests and cached tokens; and what drains.

        Raises:
            grpc.RpcError: PERMISSION_DENIED: the caller is neither an admin nor a reader.
        """
        answer: ListAdaptersResponse = self._ask(self._cache.ListAdapters, ListAdaptersRequest())
        return answer

    def drain(self) -> None:
        """End the service as SIGTERM does: it refuses new requests, finishes running ones and exits. Returns at once.

        Raises:
            grpc.RpcError: PERMISSION_DENIED: the caller is no admin.
        """
        self._ask(self._cache.Drain, DrainRequest())

    def health(self, service: str = "", *, timeout_s: float | None = None) -> ServingStatus:
        """Ask whether the service accepts requests. Needs no credential.

        Args:
            service: name of one gRPC service, such as `radixkv.v1.PrefillService`; empty for the server.
            timeout_s: deadline of this call.

        Raises:
            grpc.RpcError: the server can't be reached, has no such service (NOT_FOUND), or was installed without gRPC's
                health service (UNIMPLEMENTED).
        """
        status: ServingStatus = self._ask(self._check_health, StringValue(value=service), timeout_s=timeout_s)
        return status

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the served model. Its files are asked for once, and kept for later processes by digest.

        Raises:
            MissingPackage: the extra `text` is not installed.
            ValueError: the answer is no zip of tokenizer files with the digest that it has, or can't be loaded.
            grpc.RpcError: the service can't be reached, or has no tokenizer (NOT_FOUND).
        """
        reader = ArchiveReader()
        for chunk in self._ask(self._model.GetTokenizer, GetTokenizerRequest(digest_only=True)):
            reader.put(chunk)
        if (directory := kept(reader.digest)) is None:
            for chunk in self._ask(self._model.GetTokenizer, GetTokenizerRequest()):
                reader.put(chunk)
            directory = reader.keep()
        return Tokenizer.load(directory)

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
            grpc.RpcError: OUT_OF_RANGE or DATA_LOSS: begin again from 0; UNAVAILABLE: the service ended.
        """
        request = SubscribeRequest(start_sequence_number=start_sequence_number, stores=stores)
        return AnswerStream(self._events.Subscribe(request, timeout=timeout(timeout_s), metadata=self._access.metadata))

    def _ask(self, call: Any, request: Message, metadata: Any = None, timeout_s: float | None = None) -> Any:
        return call(request, timeout=self._timeout(timeout_s), metadata=metadata or self._access.metadata)

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout(timeout_s)
