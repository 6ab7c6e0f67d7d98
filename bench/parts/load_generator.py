"""Sends prompts to a server, checks the token counts of every answer, and records when it arrived."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from bench.parts.workloads import WorkItem
from radixkv.v1 import prefill_pb2

OK = "OK"
WRONG_ANSWER = "WRONG_ANSWER"

# When a pass stops sending, the requests in flight have this share of its limit to be answered. Otherwise the slowest
# answers would be missing from the measured times.
_ANSWER_SHARE = 0.25


class Ending(enum.Enum):
    """Why a pass ended."""

    FINISHED = "finished"
    TIME_LIMIT = "time limit"
    INTERRUPTED = "interrupted"


PrefillCall = Callable[..., Awaitable[prefill_pb2.PrefillResponse]]
"""Sends a request: `call(request, timeout=seconds)`. Awaiting the result may raise `grpc.aio.AioRpcError`."""


@dataclass(frozen=True, slots=True)
class ReplayTraffic:
    """How a pass sends its requests.

    Attributes:
        tenant: tenant of all requests.
        use_cache: read and write the cache, or do neither.
        concurrency: maximum number of requests in flight (closed loop); None to send each at its `arrival_s` (open
            loop).
        timeout_s: deadline of each request.
        limit_s: the pass stops sending after this time. Requests that are still in flight after 1.25 times this time
            are abandoned. None for no limit.
    """

    tenant: str
    use_cache: bool
    concurrency: int | None
    timeout_s: float
    limit_s: float | None = None


def sending_limit_s(total_s: float) -> float:
    """Return the `limit_s` with which a pass ends within `total_s`, including the time for its last answers."""
    return total_s / (1 + _ANSWER_SHARE)


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Result of one request. Token counts and server times are 0 unless `status` is OK.

    Attributes:
        index: position of its prompt in the traffic.
        status: `OK`, a gRPC status name, or `WRONG_ANSWER` if the token counts of the answer do not add up, or if
            tokens were cached in a pass without the cache.
        sent_s: time of the call, counted from the start of the pass.
        late_s: time from its arrival in the traffic to the call; 0 in a closed loop.
        ttft_s: time from the call to the answer.
    """

    index: int
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
    """One replay of a list of prompts, or of as many as were sent before the time limit.

    Attributes:
        outcomes: one for each request that was answered or failed, by increasing index.
        wall_s: duration of the pass.
        cpu_s: CPU time of the load generator.
        num_planned: requests that a pass without a limit would send.
        ended_by: why it ended.
    """

    outcomes: tuple[CallOutcome, ...]
    wall_s: float
    cpu_s: float
    num_planned: int
    ended_by: Ending = Ending.FINISHED


def prefill_call(channel: grpc.aio.Channel) -> PrefillCall:
    """Return the callable with which `replay` sends requests."""
    return channel.unary_unary(
        "/radixkv.v1.PrefillService/Prefill",
        request_serializer=prefill_pb2.PrefillRequest.SerializeToString,
        response_deserializer=prefill_pb2.PrefillResponse.FromString,
    )


def build_message(token_ids: npt.NDArray[np.uint32]) -> prefill_pb2.PrefillRequest:
    """Build the message of a prompt. It takes 23 ns per token, too long to do between two calls."""
    return prefill_pb2.PrefillRequest(token_ids=token_ids.tolist())


async def replay(
    call: PrefillCall,
    items: Sequence[WorkItem],
    messages: Sequence[prefill_pb2.PrefillRequest],
    traffic: ReplayTraffic,
    on_answer: Callable[[], object] = lambda: None,
    *,
    order: Sequence[int] | None = None,
    stop: asyncio.Event | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Pass:
    """Send each prompt once, until the time limit is reached. A failed request is recorded as an outcome.

    Args:
        call: sends a request; made by `prefill_call`.
        items: prompts with their arrival times.
        messages: one message for each item. Their tenant, adapter and cache flags are overwritten.
        traffic: how to send them.
        on_answer: called after each answer or failure.
        order: indices of the prompts to send, in the order of sending; increasing in an open loop. None sends all.
        stop: ends the pass when it is set; requests in flight are abandoned.
        clock: seconds.
    """
    order = range(len(items)) if order is None else order
    for item, message in zip(items, messages, strict=True):
        message.tenant, message.adapter = traffic.tenant + item.tenant, item.adapter
        message.read_cache = message.write_cache = traffic.use_cache
    outcomes: list[CallOutcome] = []
    cpu_start_s = time.process_time()
    start_s = clock()

    def is_limit_reached() -> bool:
        return traffic.limit_s is not None and clock() - start_s >= traffic.limit_s

    async def send(index: int, arrival_s: float | None) -> None:
        outcomes.append(await _send(call, index, messages[index], traffic, start_s, arrival_s, clock))
        on_answer()

    async def send_next_of(indices: Iterator[int]) -> None:
        while not is_limit_reached() and (index := next(indices, None)) is not None:
            await send(index, None)

    async def send_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            if traffic.concurrency is not None:
                shared_indices = iter(order)
                for _ in range(min(traffic.concurrency, len(order))):
                    tasks.create_task(send_next_of(shared_indices))
                return
            for index in order:
                if traffic.limit_s is not None and items[index].arrival_s >= traffic.limit_s:
                    return
                wait_s = items[index].arrival_s - (clock() - start_s)
                await asyncio.sleep(max(0.0, wait_s))
                if is_limit_reached():
                    return
                tasks.create_task(send(index, items[index].arrival_s))

    timeout_s = None if traffic.limit_s is None else traffic.limit_s * (1 + _ANSWER_SHARE)
    await _run_until(send_all(), stop or asyncio.Event(), timeout_s)
    wall_s = clock() - start_s
    ended_by = Ending.FINISHED
    if len(outcomes) < len(order):
        ended_by = Ending.INTERRUPTED if stop is not None and stop.is_set() else Ending.TIME_LIMIT
    by_index = tuple(sorted(outcomes, key=lambda outcome: outcome.index))
    return Pass(by_index, wall_s, time.process_time() - cpu_start_s, len(order), ended_by)


async def _run_until(sending: Coroutine[object, object, None], stop: asyncio.Event, timeout_s: float | None) -> None:
    """Run `sending` to its end; cancel it when `stop` is set or after the timeout."""
    tasks = (asyncio.create_task(sending), asyncio.create_task(stop.wait()))
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        sending_result, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(sending_result, BaseException) and not isinstance(sending_result, asyncio.CancelledError):
        raise sending_result


async def _send(
    call: PrefillCall,
    index: int,
    message: prefill_pb2.PrefillRequest,
    traffic: ReplayTraffic,
    start_s: float,
    arrival_s: float | None,
    clock: Callable[[], float],
) -> CallOutcome:
    sent_at_s = clock()
    try:
        answer = await call(message, timeout=traffic.timeout_s)
        status = OK if _adds_up(answer.usage, len(message.token_ids), traffic.use_cache) else WRONG_ANSWER
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    ttft_s = clock() - sent_at_s
    sent_s = sent_at_s - start_s
    late_s = 0.0 if arrival_s is None else sent_s - arrival_s
    if status != OK:
        return CallOutcome(index, status, sent_s, late_s, ttft_s)
    usage, timing = answer.usage, answer.timing
    return CallOutcome(
        index,
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
