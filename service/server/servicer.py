"""The gRPC services: each method reads a message, asks the engine and writes its answer.

The event loop never touches the cache. It hands a request to the engine and awaits a future. A caller that goes away
cancels its future, and with it the request. `radixkv.service.server.status` turns exceptions into statuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import grpc

from radixkv.api.caller import Caller
from radixkv.api.result import GenerationFuture, PrefillResult
from radixkv.api.stats import DEFAULT_MAX_TENANTS
from radixkv.errors import InvalidRequest, RadixKVError
from radixkv.service.server.adapters.adapter_calls import AdapterCalls
from radixkv.service.server.calls import answer_of, authorization_of, traceparent_of
from radixkv.service.server.generation.answer_writer import AnswerWriter
from radixkv.service.server.generation.logprob_messages import with_logprobs
from radixkv.service.server.generation.options import read_grammar, read_num_answers, read_sampling
from radixkv.service.server.intake.account import Account
from radixkv.service.server.intake.deadlines import Deadlines
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.messages import (
    grant_message,
    last_response,
    prefill_response,
    purge_message,
    read_caller,
    read_params,
    read_retention,
    require_names,
    stats_response,
    tenant_stats_response,
    timestamp,
    usage_message,
)
from radixkv.service.server.public.public_calls import PublicCalls
from radixkv.service.server.segments.segment_lister import SegmentLister
from radixkv.service.server.shared_parts import SharedParts
from radixkv.service.server.stop_strings import stop_strings
from radixkv.service.server.token_stream import TokenStream
from radixkv.service.server.transfer.kv_fetcher import KVFetcher
from radixkv.service.server.transfer.kv_sender import KVSender
from radixkv.service.server.transfer.kv_sources import KVSources
from radixkv.service.server.transfer.role import require_call
from radixkv.service.server.unfinished_calls import Context, when_over
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import cache_pb2, cache_pb2_grpc, prefill_pb2, prefill_pb2_grpc

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Answers prompts, generations and probes, and takes leases back."""

    def __init__(self, engine: Engine, shared: SharedParts, deadlines: Deadlines, sources: KVSources) -> None:
        self._engine = engine
        self._shared = shared
        self._deadlines = deadlines
        self._mailbox = Mailbox()
        self._writer = AnswerWriter()
        self._kv_sender = KVSender(engine, self._mailbox)
        self._kv_fetcher = KVFetcher(engine, self._mailbox, sources)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:  # noqa: N802
        """Compute the part of a prompt that is not cached, and answer with the next token."""
        require_call(self._engine, "Prefill")
        params = read_params(request, self._seconds_left(context), traceparent_of(context))
        future = self._engine.prefill(params)
        if params.hold_lease:
            when_over(context, partial(self._release_untold, future, params.caller))
        result = await answer_of(self._engine, self._mailbox, future)
        return prefill_response(result, self._engine.limits.block_size, self._engine.limits.epoch)

    def _release_untold(self, future: Future[PrefillResult], caller: Caller, context: Context) -> None:
        """Give a lease back whose id its caller was not told, because the answer was refused or nobody was there."""
        if not (context.done() and context.code() in (None, grpc.StatusCode.OK)):
            future.add_done_callback(partial(self._release, caller))

    def _release(self, caller: Caller, done: Future[PrefillResult]) -> None:
        held = None if done.cancelled() or done.exception() is not None else done.result().held_lease
        if held is not None:
            with contextlib.suppress(RadixKVError):  # where the engine takes no call, the lease expires by itself
                self._engine.release(held.lease_id, caller)

    async def Generate(  # noqa: N802
        self, request: prefill_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.GenerateResponse | bytes]:
        """Generate tokens after a prompt. If the caller reads slowly, tokens wait and are sent together.

        Several answers to one prompt are several requests, of which one computes the prompt for all.
        """
        require_call(self._engine, "Generate")
        params = read_params(request.prefill, self._seconds_left(context), traceparent_of(context))
        sampling, num_left = read_sampling(request), read_num_answers(request)
        account = Account.of_tenant(params.caller.tenant)
        sampling = await self._shared.grammars.constrain(sampling, read_grammar(request), account)
        stops = await stop_strings(self._shared.tokenizer, request.stop, params, sampling, num_left)
        fetched = (
            await self._kv_fetcher.fetch(params, request.kv_source, authorization_of(context))
            if request.HasField("kv_source")
            else None
        )
        num_told = [0] * num_left
        futures: list[GenerationFuture] = []
        stream = TokenStream(self._mailbox, self._shared.held, account, partial(_cancel, futures))
        try:
            for index in range(num_left):
                on_tokens = partial(stream.put, index)
                futures.append(self._engine.generate(params, sampling.of_answer(index), on_tokens, fetched))
                futures[index].add_done_callback(partial(stream.end, index))
            del fetched  # the engine lets go of it when it is copied
            while num_left:
                news, ended = await stream.get()
                for index in news:
                    tokens = stream.take(index)
                    response = prefill_pb2.GenerateResponse(request_id=params.request_id, index=index)
                    response.token_ids.extend(tokens.token_ids)
                    if stops is not None:
                        num_wanted = stops.num_wanted(index, response.token_ids)
                        del response.token_ids[num_wanted:]
                        tokens.logprobs.truncate(num_wanted)
                        if stops.has_ended(index):
                            futures[index].finish()
                        if not num_wanted:
                            continue
                    if num_told[index] == 0:
                        response.usage.CopyFrom(usage_message(tokens.first_usage))
                    num_told[index] += len(response.token_ids)
                    yield await with_logprobs(self._writer, response, tokens.logprobs, tokens.prompt_logprobs)
                for index in ended:
                    result = await answer_of(self._engine, self._mailbox, futures[index])
                    result, matched = (result, "") if stops is None else stops.cut(index, result)
                    start = num_told[index]
                    logprobs = stream.take(index).logprobs
                    logprobs.extend(result.logprobs)
                    logprobs.truncate(len(result.token_ids) - start)
                    yield await with_logprobs(
                        self._writer,
                        last_response(result, start, index, matched),
                        logprobs,
                        () if start else result.prompt_logprobs,
                    )
                num_left -= len(ended)
        finally:
            stream.close()
            _cancel(futures)

    async def Probe(self, request: prefill_pb2.ProbeRequest, context: Context) -> prefill_pb2.ProbeResponse:  # noqa: N802
        """Say what a prefill of this prompt would reuse."""
        future = self._engine.probe(read_token_ids(request), read_caller(request))
        result = await answer_of(self._engine, self._mailbox, future)
        return prefill_pb2.ProbeResponse(
            cached_tokens=result.cached_tokens,
            prompt_tokens=result.prompt_tokens,
            miss_reason=result.miss_reason.value,
            stored_tokens=result.stored_tokens,
        )

    async def Release(self, request: prefill_pb2.ReleaseRequest, context: Context) -> prefill_pb2.ReleaseResponse:  # noqa: N802
        """Give back a held lease."""
        require_names(tenant=request.tenant, lease_id=request.lease_id)
        future = self._engine.release(request.lease_id, Caller(request.tenant))
        await answer_of(self._engine, self._mailbox, future)
        return prefill_pb2.ReleaseResponse()

    async def Renew(self, request: prefill_pb2.RenewRequest, context: Context) -> prefill_pb2.RenewResponse:  # noqa: N802
        """Keep a held lease for its whole time again."""
        require_names(tenant=request.tenant, lease_id=request.lease_id)
        future = self._engine.renew(request.lease_id, Caller(request.tenant))
        expires_at_s = await answer_of(self._engine, self._mailbox, future)
        return prefill_pb2.RenewResponse(lease_expires_at=timestamp(expires_at_s))

    async def FetchKV(  # noqa: N802
        self, request: prefill_pb2.FetchKVRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.FetchKVResponse]:
        """Send the K/V of a held lease."""
        async for response in self._kv_sender.responses(request):
            yield response

    def _seconds_left(self, context: Context) -> float:
        return self._deadlines.seconds_left(context.time_remaining())


def _cancel(futures: Iterable[GenerationFuture]) -> None:
    for future in futures:
        future.cancel()


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Answers operators: statistics, segments, adapters, public prefixes, retention, purges and the end of the service.

    Args:
        engine: is asked.
        start_drain: makes the service end as SIGTERM does, soon after the call that asks for it.
    """

    def __init__(self, engine: Engine, start_drain: Callable[[], None]) -> None:
        self._engine = engine
        self._start_drain = start_drain
        self._mailbox = Mailbox()
        self._segments = SegmentLister(engine, self._mailbox)
        self._adapters = AdapterCalls(engine, self._mailbox)
        self._public = PublicCalls(engine, self._mailbox)

    async def Retain(self, request: cache_pb2.RetainRequest, context: Context) -> cache_pb2.RetainResponse:  # noqa: N802
        """Set the retention priority of a cached range."""
        caller, retention = read_caller(request), read_retention(request)
        if retention is None:
            raise InvalidRequest("retention: expected one, got none")
        future = self._engine.retain(read_token_ids(request), retention, caller)
        retained = await answer_of(self._engine, self._mailbox, future)
        return cache_pb2.RetainResponse(retained=grant_message(retained))

    async def Purge(self, request: cache_pb2.PurgeRequest, context: Context) -> cache_pb2.PurgeResponse:  # noqa: N802
        """Forget namespaces."""
        require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
        future = self._engine.purge(
            tenant=request.tenant if request.HasField("tenant") else None,
            adapter=request.adapter if request.HasField("adapter") else None,
            salt=request.salt if request.HasField("salt") else None,
        )
        purged = await answer_of(self._engine, self._mailbox, future)
        return purge_message(purged)

    async def ListSegments(  # noqa: N802
        self, request: cache_pb2.ListSegmentsRequest, context: Context
    ) -> cache_pb2.ListSegmentsResponse:
        """List what is cached."""
        return await self._segments.answer(request)

    async def Stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:  # noqa: N802
        """Count what the engine holds and has done, or only what is one tenant's."""
        require_names(tenant=request.tenant)
        max_tenants = request.max_tenants if request.HasField("max_tenants") else DEFAULT_MAX_TENANTS
        if request.HasField("tenant"):
            stats = await answer_of(self._engine, self._mailbox, self._engine.stats(tenant=request.tenant))
            return tenant_stats_response(self._engine.limits, stats, request.tenant)
        stats = await answer_of(self._engine, self._mailbox, self._engine.stats(max_tenants))
        tiers = () if self._engine.offload is None else self._engine.offload.stats()
        return stats_response(self._engine.limits, stats, tiers)

    async def LoadAdapter(  # noqa: N802
        self, request: cache_pb2.LoadAdapterRequest, context: Context
    ) -> cache_pb2.LoadAdapterResponse:
        """Let a name stand for an adapter."""
        return await self._adapters.load(request)

    async def UnloadAdapter(  # noqa: N802
        self, request: cache_pb2.UnloadAdapterRequest, context: Context
    ) -> cache_pb2.UnloadAdapterResponse:
        """Let a name stand for nothing."""
        return await self._adapters.unload(request)

    async def ListAdapters(  # noqa: N802
        self, request: cache_pb2.ListAdaptersRequest, context: Context
    ) -> cache_pb2.ListAdaptersResponse:
        """List the adapters."""
        return await self._adapters.list()

    async def RegisterPublicPrefix(  # noqa: N802
        self, request: cache_pb2.RegisterPublicPrefixRequest, context: Context
    ) -> cache_pb2.RegisterPublicPrefixResponse:
        """Make a prefix public."""
        return await self._public.register(request)

    async def UnregisterPublicPrefix(  # noqa: N802
        self, request: cache_pb2.UnregisterPublicPrefixRequest, context: Context
    ) -> cache_pb2.UnregisterPublicPrefixResponse:
        """Let no more prompts use a public prefix."""
        return await self._public.unregister(request)

    async def ListPublicPrefixes(  # noqa: N802
        self, request: cache_pb2.ListPublicPrefixesRequest, context: Context
    ) -> cache_pb2.ListPublicPrefixesResponse:
        """List the public prefixes."""
        return await self._public.list()

    async def Drain(self, request: cache_pb2.DrainRequest, context: Context) -> cache_pb2.DrainResponse:  # noqa: N802
        """End the service as SIGTERM does."""
        self._start_drain()
        return cache_pb2.DrainResponse()
