"""The gRPC service for prompts: prefill, generation, probes, held leases and their K/V.

The event loop never touches the cache: a servicer passes a request to the engine and awaits a future. A call that is
cancelled cancels its future, and with it the request. `GuardedServer` turns exceptions into statuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import grpc

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.errors import RadixKVError, SwitchedOff
from radixkv.service.server.calls import Context, add_done_callback
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.server.servicers.engine_calls import Deadlines, authorization_of, result_of, traceparent_of
from radixkv.service.server.servicers.generation import Explanation, GenerateCall
from radixkv.service.server.servicers.kv_fetcher import KVFetcher
from radixkv.service.server.servicers.kv_sender import KVSender
from radixkv.service.server.servicers.kv_sources import KVSources
from radixkv.service.server.servicers.messages import (
    prefill_response,
    read_caller,
    read_grammar,
    read_num_completions,
    read_params,
    read_sampling,
    require_names,
    timestamp,
)
from radixkv.service.server.servicers.response_writer import ResponseWriter
from radixkv.service.server.servicers.stop_strings import stop_strings
from radixkv.service.server.servicers.tool_calls import with_tool_calls
from radixkv.service.server.shared_parts import SharedParts
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import prefill_pb2, prefill_pb2_grpc

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

# The call that a server refuses, by `transfer.role`.
_REFUSED_CALLS = {"both": "", "prefill": "Generate", "decode": "Prefill"}


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves prompts.

    Args:
        engine: computes the prompts.
        shared: parts that other servicers use as well.
        deadlines: the time that a prompt may take.
        sources: servers to fetch K/V from.
    """

    def __init__(self, engine: Engine, shared: SharedParts, deadlines: Deadlines, sources: KVSources) -> None:
        self._engine = engine
        self._shared = shared
        self._deadlines = deadlines
        self._mailbox = Mailbox()
        self._writer = ResponseWriter()
        self._kv_sender = KVSender(engine, self._mailbox)
        self._kv_fetcher = KVFetcher(engine, self._mailbox, sources)
        self._role = "both" if engine.transfer is None else engine.transfer.config.role

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:  # noqa: N802
        """Compute the part of a prompt that is not cached, and return the next token."""
        self._require_role("Prefill")
        params = read_params(request, self._seconds_left(context), traceparent_of(context))
        async with self._begin_explanation(request, params) as explanation:
            future = self._engine.prefill(params)
            if params.hold_lease:
                add_done_callback(partial(self._release_unreported, future, params.caller, context))
            result = await result_of(self._engine, self._mailbox, future)
            limits = self._engine.limits
            has_table = request.return_block_table
            response = prefill_response(result, limits.block_size, limits.epoch, has_block_table=has_table)
            if explanation is not None:
                response.explanation.CopyFrom(await explanation)
            return response

    @contextlib.asynccontextmanager
    async def _begin_explanation(
        self, request: prefill_pb2.PrefillRequest, params: PrefillParams
    ) -> AsyncIterator[Explanation | None]:
        """Begin to explain a prompt if the request asks for it, and cancel the explanation at the end of the context.

        Yields:
            The explanation, which is made while the prompt is computed; None if the request does not ask for it.

        Raises the same errors as `Explainer.begin`.
        """
        if not request.explain:
            yield None
            return
        has_branch = not request.omit_cached_text
        explanation = await self._shared.explainer.begin(params.tokens, params.caller, has_branch=has_branch)
        try:
            yield explanation
        finally:
            explanation.cancel()

    def _release_unreported(self, future: Future[PrefillResult], caller: Caller, context: Context) -> None:
        """Release a held lease whose id did not reach the caller, because the call was refused or cancelled."""
        if not (context.done() and context.code() in (None, grpc.StatusCode.OK)):
            future.add_done_callback(partial(self._release, caller))

    def _release(self, caller: Caller, done: Future[PrefillResult]) -> None:
        held = None if done.cancelled() or done.exception() is not None else done.result().held_lease
        if held is not None:
            with contextlib.suppress(RadixKVError):  # if the engine accepts no call, the lease expires by itself
                self._engine.release(held.lease_id, caller)

    async def Generate(  # noqa: N802
        self, request: prefill_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.GenerateResponse | bytes]:
        """Generate `n` completions of a prompt. For a slow reader, tokens accumulate and are sent together.

        With n > 1, each completion is its own request of the engine; the prompt is prefilled once.
        """
        self._require_role("Generate")
        params = read_params(request.prefill, self._seconds_left(context), traceparent_of(context))
        num_completions = read_num_completions(request)
        key = QuotaKey.of_tenant(params.caller.tenant)
        sampling = await self._shared.grammars.constrain(read_sampling(request), read_grammar(request), key)
        sampling = await with_tool_calls(self._shared.tokenizer, request.tool_call_begin, sampling)
        stops = await stop_strings(self._shared.tokenizer, request.stop, params, sampling, num_completions)
        async with self._begin_explanation(request.prefill, params) as explanation:
            generation = GenerateCall(
                self._engine, self._mailbox, self._writer, self._shared, params, stops, explanation
            )
            try:
                fetched = None
                if request.HasField("kv_source"):
                    fetched = await self._kv_fetcher.fetch(params, request.kv_source, authorization_of(context))
                generation.start(sampling, num_completions, fetched)
                del fetched  # so that the engine can free it after copying it
                async with contextlib.aclosing(generation.responses()) as responses:
                    async for response in responses:
                        yield response
            finally:
                generation.close()

    async def Probe(self, request: prefill_pb2.ProbeRequest, context: Context) -> prefill_pb2.ProbeResponse:  # noqa: N802
        """Return how much of a prompt a prefill would reuse."""
        future = self._engine.probe(read_token_ids(request), read_caller(request))
        result = await result_of(self._engine, self._mailbox, future)
        return prefill_pb2.ProbeResponse(
            cached_tokens=result.cached_tokens,
            prompt_tokens=result.prompt_tokens,
            miss_reason=result.miss_reason.value,
            stored_tokens=result.stored_tokens,
        )

    async def Release(self, request: prefill_pb2.ReleaseRequest, context: Context) -> prefill_pb2.ReleaseResponse:  # noqa: N802
        """Release a held lease."""
        require_names(tenant=request.tenant, lease_id=request.lease_id)
        future = self._engine.release(request.lease_id, Caller(request.tenant))
        await result_of(self._engine, self._mailbox, future)
        return prefill_pb2.ReleaseResponse()

    async def Renew(self, request: prefill_pb2.RenewRequest, context: Context) -> prefill_pb2.RenewResponse:  # noqa: N802
        """Restart the time to live of a held lease."""
        require_names(tenant=request.tenant, lease_id=request.lease_id)
        future = self._engine.renew(request.lease_id, Caller(request.tenant))
        expires_at_s = await result_of(self._engine, self._mailbox, future)
        return prefill_pb2.RenewResponse(lease_expires_at=timestamp(expires_at_s))

    async def FetchKV(  # noqa: N802
        self, request: prefill_pb2.FetchKVRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.FetchKVResponse]:
        """Send the K/V of a held lease."""
        async for response in self._kv_sender.responses(request):
            yield response

    def _require_role(self, call: str) -> None:
        """Raise SwitchedOff if the role of this server excludes a call."""
        if call == _REFUSED_CALLS[self._role]:
            raise SwitchedOff(f"{call}: this server does not offer it, because its transfer.role is {self._role}")

    def _seconds_left(self, context: Context) -> float:
        return self._deadlines.seconds_left(context.time_remaining())
