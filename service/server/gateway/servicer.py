"""vLLM's engine protocol over an engine: each method reads a message of the gateway and asks the engine.

All of the gateway's requests are those of one tenant, the configuration's. Statuses are those of
`radixkv.service.server.status`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.result import TokenLogprobs, Usage
from radixkv.config import Config
from radixkv.gateway import engine_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from radixkv.service.server.calls import answer_of, traceparent_of
from radixkv.service.server.gateway.descriptions import loads_response, model_info, scheduler_load, server_info
from radixkv.service.server.gateway.event_stream import EventStream
from radixkv.service.server.gateway.requests import Asked, read_generation
from radixkv.service.server.gateway.responses import (
    aborted_response,
    chunk_response,
    complete_response,
    with_logprobs,
)
from radixkv.service.server.gateway.running_calls import RunningCall, RunningCalls
from radixkv.service.server.gateway.traffic import Traffic
from radixkv.service.server.generation.answer_writer import AnswerWriter
from radixkv.service.server.intake.account import Account
from radixkv.service.server.intake.deadlines import Deadlines
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.model_servicer import pieces_of
from radixkv.service.server.shared_parts import SharedParts
from radixkv.service.server.stop_strings import StopStrings, stop_strings
from radixkv.service.server.token_stream import TokenStream
from radixkv.service.server.unfinished_calls import Context

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

_SERVICE: str = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name


def add_gateway(server: grpc.aio.Server, shared: SharedParts, engine: Engine, config: Config) -> str:
    """Add the gateway's service to a server. To be called inside the event loop that runs it.

    Returns:
        The service's name.
    """
    servicer = GatewayServicer(engine, config, shared)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    return _SERVICE


class GatewayServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers a gateway that has the tokenizer and chooses among servers."""

    def __init__(self, engine: Engine, config: Config, shared: SharedParts) -> None:
        self._readers = shared.readers
        self._engine = engine
        self._config = config
        self._deadlines = Deadlines.of(config.server)
        self._mailbox = Mailbox()
        self._tokenizer = shared.tokenizer
        self._grammars = shared.grammars
        self._held = shared.held
        self._writer = AnswerWriter()
        self._calls = RunningCalls()
        self._traffic = Traffic()

    async def Generate(  # noqa: N802
        self, request: vllm_engine_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse | bytes]:
        """Generate tokens after a prompt. A call that ends early cancels its requests, and so does `Abort`."""
        asked = read_generation(
            request,
            self._engine.limits,
            self._config.gateway.tenant,
            self._deadlines.seconds_left(context.time_remaining()),
            traceparent_of(context),
        )
        with self._calls.running(asked.params.request_id) as call:
            async with contextlib.aclosing(self._answers(asked, call)) as responses:
                async for response in responses:
                    yield response

    async def _answers(
        self, asked: Asked, call: RunningCall
    ) -> AsyncGenerator[vllm_engine_pb2.GenerateResponse | bytes]:
        account = Account.of_tenant(asked.params.caller.tenant)
        sampling = await self._grammars.constrain(asked.sampling, asked.grammar, account)
        stops = await stop_strings(self._tokenizer, asked.stops, asked.params, sampling, asked.num_answers)
        stop_token_ids = sampling.stop_token_ids | self._engine.eos_token_ids
        with contextlib.closing(TokenStream(self._mailbox, self._held, account, call.cancel)) as stream:
            tell = stream.put if asked.is_streamed or stops is not None else stream.keep
            for index in range(asked.num_answers):
                generation = self._engine.generate(asked.params, sampling.of_answer(index), partial(tell, index))
                call.futures.append(generation)
                generation.add_done_callback(partial(stream.end, index))
            if call.is_aborted:  # while the tokenizer was loaded
                call.cancel()
            async with contextlib.aclosing(self._parts(asked, call, stream, stops, stop_token_ids)) as parts:
                async for part in parts:
                    yield part

    async def _parts(
        self, asked: Asked, call: RunningCall, stream: TokenStream, stops: StopStrings | None, stop_token_ids: Set[int]
    ) -> AsyncGenerator[vllm_engine_pb2.GenerateResponse | bytes]:
        num_told, num_seen = [0] * asked.num_answers, [0] * asked.num_answers
        usages = [Usage(asked.params.num_tokens, 0, asked.params.num_tokens, 0)] * asked.num_answers
        num_left = asked.num_answers
        while num_left:
            news, ended = await stream.get()
            for index in news:
                tokens = stream.take(index) if asked.is_streamed else stream.unread(index)
                usages[index] = tokens.last_usage
                token_ids = tokens.token_ids[num_seen[index] :]
                if not asked.is_streamed:
                    num_seen[index] += len(token_ids)
                if stops is not None:
                    del token_ids[stops.num_wanted(index, token_ids) :]
                    if stops.has_ended(index):
                        call.futures[index].finish()
                if asked.is_streamed and token_ids:
                    num_told[index] += len(token_ids)
                    self._traffic.generated(len(token_ids))
                    chunk = chunk_response(token_ids, usages[index], index)
                    yield await self._telling(chunk, asked, tokens.logprobs, tokens.prompt_logprobs)
            for index in ended:
                if call.is_aborted and call.futures[index].cancelled():
                    yield aborted_response(usages[index].prompt_tokens, usages[index].cached_tokens, index)
                    continue
                result = await answer_of(self._engine, self._mailbox, call.futures[index])
                result, matched = (result, "") if stops is None else stops.cut(index, result)
                start = num_told[index]
                self._traffic.generated(len(result.token_ids) - start)
                self._traffic.answered(result.usage)
                of_prompt = () if start else result.prompt_logprobs
                logprobs = stream.take(index).logprobs
                logprobs.extend(result.logprobs)
                if asked.is_streamed and start < len(result.token_ids):
                    chunk = chunk_response(result.token_ids[start:], result.usage, index)
                    yield await self._telling(chunk, asked, logprobs, of_prompt)
                    of_prompt = ()
                has_stop_token = result.token_ids[-1] in stop_token_ids
                complete = complete_response(result, start, index, matched, has_stop_token=has_stop_token)
                yield await self._telling(complete, asked, logprobs, of_prompt)
            num_left -= len(ended)

    async def _telling(
        self,
        response: vllm_engine_pb2.GenerateResponse,
        asked: Asked,
        logprobs: LogprobTable,
        of_prompt: Sequence[TokenLogprobs],
    ) -> vllm_engine_pb2.GenerateResponse | bytes:
        """Add log probabilities to a part of an answer: of its tokens, and of the prompt if they come with it."""
        return await with_logprobs(self._writer, response, logprobs, asked.params.tokens, of_prompt)

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: Context) -> vllm_engine_pb2.AbortResponse:  # noqa: N802
        """End running requests; each is answered with what it has told."""
        self._calls.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Say whether new requests are taken and steps work."""
        if self._engine.is_healthy:
            return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="serving")
        return vllm_engine_pb2.HealthCheckResponse(healthy=False, message="draining, or steps hang or keep failing")

    async def GetModelInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Describe the model."""
        return model_info(self._engine.limits, self._engine.eos_token_ids, self._config)

    async def GetServerInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Describe the process."""
        stats = await answer_of(self._engine, self._mailbox, self._engine.stats())
        return server_info(self._engine.limits, stats, self._config)

    async def GetLoads(  # noqa: N802
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Say how full the engine is."""
        return loads_response(await self._load())

    async def SubscribeKvEvents(  # noqa: N802
        self, request: engine_common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[engine_common_pb2.KvEventBatch]:
        """Tell what is cached for the gateway's tenant, and how full the engine is.

        Metadata leave at once, since the gateway waits for them; but only once its number is known to be right, because
        a refusal after them is one that it tries again for ever.
        """
        if self._readers is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "events: expected an engine with a log, got none")
        async with contextlib.aclosing(self._readers.subscribe(request.start_sequence_number)) as batches:
            await context.send_initial_metadata(())
            stream = EventStream(batches, 0 if request.load_records_before_first_batch else None, self._load)
            async with contextlib.aclosing(stream.messages()) as messages:
                async for message in messages:
                    yield message

    async def GetTokenizer(  # noqa: N802
        self, request: engine_common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[engine_common_pb2.GetTokenizerChunk]:
        """Stream the zip of the tokenizer's files, and its digest with the last piece."""
        async for data, digest in pieces_of(self._tokenizer):
            yield engine_common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    async def FlushCache(  # noqa: N802
        self, request: engine_common_pb2.FlushCacheRequest, context: Context
    ) -> engine_common_pb2.FlushCacheResponse:
        """Forget what is cached for the gateway's tenant. Other tenants keep theirs."""
        future = self._engine.purge(tenant=self._config.gateway.tenant, adapter=None, salt=None)
        purged = await answer_of(self._engine, self._mailbox, future)
        message = f"freed {purged.freed_blocks} blocks; {purged.pinned_blocks} more are in use until requests end"
        return engine_common_pb2.FlushCacheResponse(success=True, message=message)

    async def _load(self) -> vllm_engine_pb2.SchedulerLoad:
        load = await answer_of(self._engine, self._mailbox, self._engine.load())
        return scheduler_load(self._engine.limits, load, self._traffic, self._config)
