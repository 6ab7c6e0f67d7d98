"""The gRPC service for prompts: prefill, generation, probes, held leases and their K/V.

The event loop never touches the cache: a servicer passes a request to the engine and awaits a future. A call that is
cancelled cancels its future, and with it the request. `GuardedServer` turns exceptions into statuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import grpc

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.api.sampling import Sampling
from radixkv.config import ServerConfig
from radixkv.errors import InvalidRequest, RadixKVError, SwitchedOff
from radixkv.service.server.calls import Context, add_done_callback
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.server.servicers.engine_calls import authorization_of, result_of, seconds_left, traceparent_of
from radixkv.service.server.servicers.generation import Explanation, GenerateCall
from radixkv.service.server.servicers.kv_fetcher import KVFetcher
from radixkv.service.server.servicers.kv_sender import KVSender
from radixkv.service.server.servicers.messages import (
    MAX_NAME_CHARS,
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
from radixkv.service.server.shared_parts import SharedParts
from radixkv.service.text.tokenizer import Tokenizer
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
        config: limits the time that a prompt may take.

    Raises:
        ConfigError: a section `kv_sources` cannot be used.
    """

    def __init__(self, engine: Engine, shared: SharedParts, config: ServerConfig) -> None:
        self._engine = engine
        self._shared = shared
        self._config = config
        self._mailbox = Mailbox()
        self._writer = ResponseWriter()
        self._kv_sender = KVSender(engine, self._mailbox)
        self._kv_fetcher = KVFetcher(engine, self._mailbox)
        self._role = "both" if engine.transfer is None else engine.transfer.config.role

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:  # noqa: N802
        """Compute the part of a prompt that is not cached, and return the next token."""
        self._require_role("Prefill")
        params = read_params(request, seconds_left(context, self._config), traceparent_of(context))
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
        params = read_params(request.prefill, seconds_left(context, self._config), traceparent_of(context))
        num_completions = read_num_completions(request)
        key = QuotaKey.of_tenant(params.caller.tenant)
        sampling = await self._shared.grammars.constrain(read_sampling(request), read_grammar(request), key)
        sampling = await _with_tool_calls(self._shared.tokenizer, request.tool_call_begin, sampling)
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


async def _with_tool_calls(tokenizer: ModelTokenizer, begin: str, sampling: Sampling) -> Sampling:
    """Return the options of a generation that recognizes tool calls by the text with which they begin.

    Args:
        tokenizer: the model's tokenizer, which is loaded on another thread.
        begin: the text; empty to change nothing.
        sampling: the options.

    Raises:
        InvalidRequest: the text is too long, or the model has no tokenizer.
    """
    if not begin:
        return sampling
    if len(begin) > MAX_NAME_CHARS:
        raise InvalidRequest(f"tool_call_begin: expected at most {MAX_NAME_CHARS} characters, got {len(begin)}")
    loaded = await tokenizer.require_async("tool_call_begin", "the recognition of tool calls requires")
    return dataclasses.replace(
        sampling, is_tool_call=partial(_contains_tool_call, loaded, begin, loaded.special_id(begin))
    )


def _contains_tool_call(tokenizer: Tokenizer, begin: str, begin_id: int | None, token_ids: Sequence[int]) -> bool:
    return begin_id in token_ids if begin_id is not None else begin in tokenizer.decode(token_ids)
