"""vLLM's engine protocol for an engine: each method reads a request of the gateway and calls the engine.

All requests of the gateway belong to one tenant, `gateway.tenant`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.result import GenerateResult, TokenLogprobs, Usage
from radixkv.config import Config
from radixkv.gateway import engine_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from radixkv.service.server.calls import Context
from radixkv.service.server.gateway.descriptions import loads_response, model_info, scheduler_load, server_info
from radixkv.service.server.gateway.event_stream import GatewayEvents
from radixkv.service.server.gateway.requests import GatewayGeneration, read_generation
from radixkv.service.server.gateway.responses import (
    aborted_response,
    add_logprobs,
    chunk_response,
    complete_response,
)
from radixkv.service.server.gateway.running_calls import RunningCall, RunningCalls
from radixkv.service.server.gateway.token_counter import TokenCounter
from radixkv.service.server.guarded_server import GuardedServer
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.server.servicers.engine_calls import result_of, seconds_left, traceparent_of
from radixkv.service.server.servicers.model import archive_chunks
from radixkv.service.server.servicers.response_writer import ResponseWriter
from radixkv.service.server.servicers.stop_strings import StopStrings, stop_strings
from radixkv.service.server.servicers.token_stream import TokenStream
from radixkv.service.server.shared_parts import SharedParts

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

Response = vllm_engine_pb2.GenerateResponse | bytes

_SERVICE: str = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name


def add_gateway(server: GuardedServer, shared: SharedParts, engine: Engine, config: Config) -> str:
    """Add the gateway's service to a server, inside its event loop.

    Returns:
        The name of the service.
    """
    servicer = GatewayServicer(engine, config, shared)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    return _SERVICE


class GatewayServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves a gateway, which tokenizes prompts and chooses a server for each."""

    def __init__(self, engine: Engine, config: Config, shared: SharedParts) -> None:
        self._engine = engine
        self._config = config
        self._shared = shared
        self._mailbox = Mailbox()
        self._writer = ResponseWriter()
        self._calls = RunningCalls()
        self._token_counter = TokenCounter()

    async def Generate(  # noqa: N802
        self, request: vllm_engine_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[Response]:
        """Generate completions of a prompt. A call that is cancelled, or aborted by `Abort`, cancels its requests."""
        generation = read_generation(
            request,
            self._engine.limits,
            self._config.gateway.tenant,
            seconds_left(context, self._config.server),
            traceparent_of(context),
        )
        with self._calls.running(generation.params.request_id) as call:
            completions = _Completions(
                self._engine, self._mailbox, self._writer, self._shared, self._token_counter, generation, call
            )
            async with contextlib.aclosing(completions.responses()) as responses:
                async for response in responses:
                    yield response

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: Context) -> vllm_engine_pb2.AbortResponse:  # noqa: N802
        """Abort running requests; each ends with the finish reason `abort`."""
        self._calls.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Report whether new requests are accepted and steps succeed."""
        if self._engine.is_healthy:
            return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="serving")
        return vllm_engine_pb2.HealthCheckResponse(healthy=False, message="draining, or steps stall or keep failing")

    async def GetModelInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Describe the model."""
        return model_info(self._engine.limits, self._engine.eos_token_ids, self._config)

    async def GetServerInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Describe the process."""
        stats = await result_of(self._engine, self._mailbox, self._engine.stats())
        return server_info(self._engine.limits, stats, self._config)

    async def GetLoads(  # noqa: N802
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Return the engine's load."""
        return loads_response(await self._load())

    async def SubscribeKvEvents(  # noqa: N802
        self, request: engine_common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[engine_common_pb2.KvEventBatch]:
        """Stream what is cached for the gateway's tenant, and the engine's load.

        The gateway waits for the initial metadata, so they are sent before the first message. They are sent only after
        the sequence number was accepted: if the call fails after the initial metadata, the gateway retries forever.
        """
        readers = self._shared.readers
        if readers is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "events: this server keeps no event log")
        async with contextlib.aclosing(readers.subscribe(request.start_sequence_number)) as batches:
            await context.send_initial_metadata(())
            stream = GatewayEvents(batches, 0 if request.load_records_before_first_batch else None, self._load)
            async with contextlib.aclosing(stream.messages()) as messages:
                async for message in messages:
                    yield message

    async def GetTokenizer(  # noqa: N802
        self, request: engine_common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[engine_common_pb2.GetTokenizerChunk]:
        """Stream the zip archive of the tokenizer's files in chunks, with its digest in the last one."""
        async for data, digest in archive_chunks(self._shared.tokenizer):
            yield engine_common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    async def FlushCache(  # noqa: N802
        self, request: engine_common_pb2.FlushCacheRequest, context: Context
    ) -> engine_common_pb2.FlushCacheResponse:
        """Purge what is cached for the gateway's tenant, and nothing of other tenants."""
        future = self._engine.purge(tenant=self._config.gateway.tenant, adapter=None, salt=None)
        purged = await result_of(self._engine, self._mailbox, future)
        message = f"freed {purged.freed_blocks} blocks; {purged.pinned_blocks} more are in use until requests end"
        return engine_common_pb2.FlushCacheResponse(success=True, message=message)

    async def _load(self) -> vllm_engine_pb2.SchedulerLoad:
        load = await result_of(self._engine, self._mailbox, self._engine.load())
        return scheduler_load(self._engine.limits, load, self._token_counter, self._config)


class _Completion:
    """What was sent of one completion.

    Attributes:
        num_sent: number of tokens that were sent.
        num_searched: number of tokens that were searched for stop strings, although they are not sent before the end.
        usage: the latest usage.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self.num_sent = 0
        self.num_searched = 0
        self.usage = Usage(prompt_tokens, 0, prompt_tokens, 0)


class _Completions:
    """Runs the completions of one call, and yields their responses.

    Args:
        engine: generates the completions.
        mailbox: delivers the engine's results.
        writer: serializes large responses.
        shared: limits the bytes of unsent tokens, and lets streams take turns.
        token_counter: counts the tokens of all calls.
        generation: what the gateway requests.
        call: gets the futures of the completions, so that the gateway can abort them.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        writer: ResponseWriter,
        shared: SharedParts,
        token_counter: TokenCounter,
        generation: GatewayGeneration,
        call: RunningCall,
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._writer = writer
        self._shared = shared
        self._token_counter = token_counter
        self._generation = generation
        self._call = call
        self._quota_key = QuotaKey.of_tenant(generation.params.caller.tenant)
        self._stream = TokenStream(mailbox, shared.held_bytes, self._quota_key, call.cancel, shared.turns)
        self._stops: StopStrings | None = None
        self._stop_token_ids: Set[int] = frozenset()
        self._completions = [_Completion(generation.params.num_tokens) for _ in range(generation.num_completions)]

    async def responses(self) -> AsyncGenerator[Response, None]:
        """Yield chunks of new tokens if the gateway wants a stream, and the end of each completion."""
        with contextlib.closing(self._stream):
            await self._start()
            num_running = len(self._completions)
            while num_running:
                updated, ended = await self._stream.get()
                for index in updated:
                    chunk = await self._new_chunk(index)
                    if chunk is not None:
                        yield chunk
                for index in ended:
                    if self._call.is_aborted and self._call.futures[index].cancelled():
                        usage = self._completions[index].usage
                        yield aborted_response(usage.prompt_tokens, usage.cached_tokens, index)
                        continue
                    result, matched_stop = await self._result(index)
                    start = self._completions[index].num_sent
                    prompt_logprobs = () if start else result.prompt_logprobs
                    logprobs = self._stream.take(index).logprobs
                    logprobs.extend(result.logprobs)
                    if self._generation.is_streamed and start < len(result.token_ids):
                        chunk = chunk_response(result.token_ids[start:], result.usage, index)
                        yield await self._add_logprobs(chunk, logprobs, prompt_logprobs)
                        prompt_logprobs = ()
                    has_stop_token = result.token_ids[-1] in self._stop_token_ids
                    complete = complete_response(result, start, index, matched_stop, has_stop_token=has_stop_token)
                    yield await self._add_logprobs(complete, logprobs, prompt_logprobs)
                num_running -= len(ended)

    async def _start(self) -> None:
        """Submit the requests to the engine."""
        generation, call = self._generation, self._call
        sampling = await self._shared.grammars.constrain(generation.sampling, generation.grammar, self._quota_key)
        self._stops = await stop_strings(
            self._shared.tokenizer, generation.stops, generation.params, sampling, generation.num_completions
        )
        self._stop_token_ids = sampling.stop_token_ids | self._engine.eos_token_ids
        on_tokens = self._stream.put if generation.is_streamed or self._stops is not None else self._stream.keep
        for index in range(generation.num_completions):
            future = self._engine.generate(generation.params, sampling.of_answer(index), partial(on_tokens, index))
            call.futures.append(future)
            future.add_done_callback(partial(self._stream.end, index))
        if call.is_aborted:  # while the tokenizer was being loaded
            call.cancel()

    async def _new_chunk(self, index: int) -> Response | None:
        """Return a response with the new tokens of a completion; None if there are none to send.

        Without streaming, the tokens stay in the stream, and are only searched for stop strings.
        """
        completion = self._completions[index]
        is_streamed = self._generation.is_streamed
        new_tokens = self._stream.take(index) if is_streamed else self._stream.unsent(index)
        completion.usage = new_tokens.last_usage
        token_ids = new_tokens.token_ids[completion.num_searched :]
        if not is_streamed:
            completion.num_searched += len(token_ids)
        if self._stops is not None:
            del token_ids[self._stops.add_tokens(index, token_ids) :]
            if self._stops.has_ended(index):
                self._call.futures[index].finish()
        if not (is_streamed and token_ids):
            return None
        completion.num_sent += len(token_ids)
        self._token_counter.add_generated(len(token_ids))
        chunk = chunk_response(token_ids, completion.usage, index)
        return await self._add_logprobs(chunk, new_tokens.logprobs, new_tokens.prompt_logprobs)

    async def _result(self, index: int) -> tuple[GenerateResult, str]:
        """Return the result of a completion that has ended, and the stop string that ended it, or an empty string."""
        result = await result_of(self._engine, self._mailbox, self._call.futures[index])
        matched_stop = ""
        if self._stops is not None:
            result, matched_stop = self._stops.cut(index, result)
        self._token_counter.add_generated(len(result.token_ids) - self._completions[index].num_sent)
        self._token_counter.add_prompt(result.usage)
        return result, matched_stop

    async def _add_logprobs(
        self,
        response: vllm_engine_pb2.GenerateResponse,
        logprobs: LogprobTable,
        prompt_logprobs: Sequence[TokenLogprobs],
    ) -> Response:
        """Add the log probabilities of the tokens of a response, and of the prompt if there are any."""
        return await add_logprobs(self._writer, response, logprobs, self._generation.params.tokens, prompt_logprobs)
