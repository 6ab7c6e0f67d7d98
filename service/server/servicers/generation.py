"""The completions of one `Generate` call, from the engine's tokens to the messages of the response stream."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Awaitable
from functools import partial
from typing import TYPE_CHECKING

from radixkv.api.params import PrefillParams
from radixkv.api.result import GenerationFuture
from radixkv.api.sampling import Sampling
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.server.servicers.engine_calls import result_of
from radixkv.service.server.servicers.logprob_messages import add_logprobs
from radixkv.service.server.servicers.messages import last_response, usage_message
from radixkv.service.server.servicers.response_writer import ResponseWriter
from radixkv.service.server.servicers.stop_strings import StopStrings
from radixkv.service.server.servicers.token_stream import TokenStream
from radixkv.service.server.shared_parts import SharedParts
from radixkv.v1 import explain_pb2, prefill_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine
    from radixkv.offload.index.prompt_blocks import FetchedBlocks

Response = prefill_pb2.GenerateResponse | bytes
Explanation = Awaitable[explain_pb2.ExplainResponse]


class GenerateCall:
    """Runs the completions of one prompt and yields their responses.

        start ─▶ one request to the engine per completion ─▶ TokenStream ─▶ responses: chunks, then a last response each
        close ─▶ cancels completions that still run

    Args:
        engine: generates the completions.
        mailbox: delivers the engine's results.
        writer: serializes large responses.
        shared: limits the bytes of unsent tokens, and lets streams take turns.
        params: the prompt.
        stops: stop strings; None if there are none.
        explanation: why no more of the prompt is reused, for the first response; None if it was not requested.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        writer: ResponseWriter,
        shared: SharedParts,
        params: PrefillParams,
        stops: StopStrings | None,
        explanation: Explanation | None,
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._writer = writer
        self._params = params
        self._stops = stops
        self._explanation = explanation
        self._futures: list[GenerationFuture] = []
        self._num_sent: list[int] = []  # tokens that were sent, by completion
        quota_key = QuotaKey.of_tenant(params.caller.tenant)
        self._stream = TokenStream(mailbox, shared.held_bytes, quota_key, self._cancel, shared.turns)

    def start(self, sampling: Sampling, num_completions: int, fetched: FetchedBlocks | None) -> None:
        """Submit the requests. `fetched` is K/V of the prompt from another server."""
        self._num_sent = [0] * num_completions
        for index in range(num_completions):
            on_tokens = partial(self._stream.put, index)
            # Hints are applied once per call, with completion 0.
            params = self._params if index == 0 else dataclasses.replace(self._params, hints=())
            future = self._engine.generate(params, sampling.of_answer(index), on_tokens, fetched)
            self._futures.append(future)
            future.add_done_callback(partial(self._stream.end, index))

    async def responses(self) -> AsyncGenerator[Response, None]:
        """Yield chunks of new tokens as they are generated, and a last response per completion."""
        num_running = len(self._futures)
        while num_running:
            updated, ended = await self._stream.get()
            for index in updated:
                chunk = await self._chunk_response(index)
                if chunk is not None:
                    yield chunk
            for index in ended:
                yield await self._last_response(index)
            num_running -= len(ended)

    def close(self) -> None:
        """Cancel completions that still run, and drop unsent tokens."""
        self._stream.close()
        self._cancel()
        self._futures.clear()  # otherwise the call would refer to the stream through their callbacks

    async def _chunk_response(self, index: int) -> Response | None:
        """Return a response with the new tokens of a completion; None if all of them follow a stop string."""
        new_tokens = self._stream.take(index)
        token_ids = new_tokens.token_ids
        if self._stops is not None:
            num_kept = self._stops.add_tokens(index, token_ids)
            del token_ids[num_kept:]
            new_tokens.logprobs.truncate(num_kept)
            if self._stops.has_ended(index):
                self._futures[index].finish()
            if not num_kept:
                return None
        response = prefill_pb2.GenerateResponse(request_id=self._params.request_id, index=index, token_ids=token_ids)
        if self._num_sent[index] == 0:
            response.usage.CopyFrom(usage_message(new_tokens.first_usage))
        self._num_sent[index] += len(token_ids)
        await self._explain(response)
        return await add_logprobs(self._writer, response, new_tokens.logprobs, new_tokens.prompt_logprobs)

    async def _last_response(self, index: int) -> Response:
        """Return the last response of a completion, with the tokens that were not sent before."""
        result = await result_of(self._engine, self._mailbox, self._futures[index])
        matched_stop = ""
        if self._stops is not None:
            result, matched_stop = self._stops.cut(index, result)
        num_sent = self._num_sent[index]
        logprobs = self._stream.take(index).logprobs
        logprobs.extend(result.logprobs)
        logprobs.truncate(len(result.token_ids) - num_sent)
        response = last_response(result, num_sent, index, matched_stop)
        await self._explain(response)
        return await add_logprobs(self._writer, response, logprobs, () if num_sent else result.prompt_logprobs)

    async def _explain(self, response: prefill_pb2.GenerateResponse) -> None:
        """Add the explanation to the first response of completion 0."""
        if self._explanation is not None and response.index == 0:
            explanation, self._explanation = self._explanation, None
            response.explanation.CopyFrom(await explanation)

    def _cancel(self) -> None:
        for future in self._futures:
            future.cancel()
