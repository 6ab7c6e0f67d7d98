"""Sends prompts to a server, checks every answer, and notes when it came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from bench.parts.workloads import WorkItem
from radixkv.v1 import prefill_pb2

OK = "OK"
WRONG_ANSWER = "WRONG_ANSWER"


class PrefillCall(Protocol):
    """A callable that sends one request. Awaiting it gives the answer or raises `grpc.aio.AioRpcError`."""

    def __call__(
        self, request: prefill_pb2.PrefillRequest, /, *, timeout: float
    ) -> Awaitable[prefill_pb2.PrefillResponse]:
        """Send."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The way a pass sends its requests.

    Attributes:
        tenant: tenant of all requests.
        use_cache: read and write the cache, or do neither.
        concurrency: requests under way at any time; None to send each at its `arrival_s`.
        timeout_s: deadline of each request.
    """

    tenant: str
    use_cache: bool
    concurrency: int | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one request. Token counts and server times are 0 unless `status` is OK.

    Attributes:
        status: `OK`, a gRPC status name, or `WRONG_ANSWER` for counts that don't add up.
        sent_s: time of the call, counted from the start of the pass.
        late_s: time between its arrival and the call; 0 in a closed loop.
        ttft_s: time from the call to the answer.
    """

    status: str
    sent_s: float
    late_s: float
    ttft_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    queue_us: int = 0
    prefill_us: int = 0
    next_token_id: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """One replay of a list of prompts.

    Attributes:
        outcomes: one for each prompt, in prompt order.
        wall_s: time from the first call to the last answer.
        cpu_s: processor time of the load generator.
    """

    outcomes: tuple[Outcome, ...]
    wall_s: float
    cpu_s: float


def prefill_call(channel: grpc.aio.Channel) -> PrefillCall:
    """Make the callable that `replay` sends through."""
    return channel.unary_unary(
        "/radixkv.v1.PrefillService/Prefill",
        request_serializer=prefill_pb2.PrefillRequest.SerializeToString,
        response_deserializer=prefill_pb2.PrefillResponse.FromString,
    )


def build_message(token_ids: npt.NDArray[np.uint32]) -> prefill_pb2.PrefillRequest:
    """Make the message of a prompt. It takes 23 ns a token, too long to do between two calls."""
    return prefill_pb2.PrefillRequest(token_ids=token_ids.tolist())


async def replay(
    call: PrefillCall,
    items: Sequence[WorkItem],
    messages: Sequence[prefill_pb2.PrefillRequest],
    traffic: Traffic,
    on_answer: Callable[[], object] = lambda: None,
) -> Pass:
    """Send every prompt once. A failed request is an outcome like any other.

    Args:
        call: sends a request; made by `prefill_call`.
        items: prompts with their arrival times.
        messages: one message for each item. Their tenant, adapter and cache flags are overwritten.
        traffic: the way to send.
        on_answer: called after each answer.
    """
    for item, message in zip(items, messages, strict=True):
        message.tenant, message.adapter = traffic.tenant + item.tenant, item.adapter
        message.read_cache = message.write_cache = traffic.use_cache
    outcomes: list[Outcome | None] = [None] * len(items)
    cpu_start_s = time.process_time()
    start_s = time.perf_counter()

    async def send(index: int, arrival_s: float | None) -> None:
        outcomes[index] = await _send(call, messages[index], traffic, start_s, arrival_s)
        on_answer()

    async def send_next_of(indices: Iterator[int]) -> None:
        for index in indices:
            await send(index, None)

    async with asyncio.TaskGroup() as tasks:
        if traffic.concurrency is not None:
            shared_indices = iter(range(len(items)))
            for _ in range(min(traffic.concurrency, len(items))):
                tasks.create_task(send_next_of(shared_indices))
        else:
            for index, item in enumerate(items):
                early_s = item.arrival_s - (time.perf_counter() - start_s)
                await asyncio.sleep(max(0.0, early_s))
                tasks.create_task(send(index, item.arrival_s))
    wall_s = time.perf_counter() - start_s
    finished = tuple(outcome for outcome in outcomes if outcome is not None)
    assert len(finished) == len(items)
    return Pass(finished, wall_s, time.process_time() - cpu_start_s)


async def _send(
    call: PrefillCall,
    message: prefill_pb2.PrefillRequest,
    traffic: Traffic,
    start_s: float,
    arrival_s: float | None,
) -> Outcome:
    sent_at_s = time.perf_counter()
    try:
        answer = await call(message, timeout=traffic.timeout_s)
        status = OK if _adds_up(answer.usage, len(message.token_ids), traffic.use_cache) else WRONG_ANSWER
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    ttft_s = time.perf_counter() - sent_at_s
    sent_s = sent_at_s - start_s
    late_s = 0.0 if arrival_s is None else sent_s - arrival_s
    if status != OK:
        return Outcome(status, sent_s, late_s, ttft_s)
    usage, timing = answer.usage, answer.timing
    return Outcome(
        status,
        sent_s,
        late_s,
        ttft_s,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        queue_us=timing.queue_us,
        prefill_us=timing.prefill_us,
        next_token_id=answer.next_token_id,
    )


def _adds_up(usage: prefill_pb2.Usage, prompt_tokens: int, use_cache: bool) -> bool:
    return (
        usage.prompt_tokens == prompt_tokens
        and usage.cached_tokens + usage.computed_tokens == prompt_tokens
        and usage.computed_tokens >= 1
        and (use_cache or usage.cached_tokens == 0)
    )
