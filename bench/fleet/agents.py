"""Generates a synthetic trace of agents that call tools, with documented statistics."""

from __future__ import annotations

import heapq
import itertools
import random

from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest

_NUM_TOOL_SETS = 2000
_END_PROBABILITY = 0.25  # that a session ends after a request
_PAUSE_S = 300.0
_DURATION_S = 3600.0  # sessions begin within this time, and later requests are left out


def agents_trace(num_requests: int = 24_000, *, seed: int = 0) -> list[TraceRequest]:
    """Generate an hour of sessions of agents. The same arguments give the same trace.

    - A session belongs to one of 2,000 tool sets, to the k-th most popular with a probability proportional to 1/k. Its
      prompts begin with the description of the tools: 2 to 40 blocks of 512 tokens, uniformly random for each set.
    - It begins at a uniformly random time, and continues with a probability of 3/4 after each request, so it has 4
      requests on average.
    - Each request adds at least one block to the session, and each further one with a probability of 1/2: 2 on average.
      The last block is filled to a uniformly random part. The pause until the next request is exponentially
      distributed, with a mean of 300 s.

    Args:
        num_requests: four times the number of sessions. The trace has fewer requests, because those after the hour are
            left out.
        seed: seed of all random choices.

    Returns:
        Requests in the order of their times.
    """
    draw = random.Random(seed)
    sizes = [draw.randint(2, 40) for _ in range(_NUM_TOOL_SETS)]
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(_NUM_TOOL_SETS)))
    next_id = sum(sizes)
    firsts = [sum(sizes[:tool]) for tool in range(_NUM_TOOL_SETS)]
    due: list[tuple[float, int, list[int]]] = []
    for session in range(round(num_requests * _END_PROBABILITY)):
        tool = draw.choices(range(_NUM_TOOL_SETS), cum_weights=weights)[0]
        ids = list(range(firsts[tool], firsts[tool] + sizes[tool]))
        heapq.heappush(due, (draw.random() * _DURATION_S, session, ids))
    requests: list[TraceRequest] = []
    while due and len(requests) < num_requests:
        time_s, session, ids = heapq.heappop(due)
        if time_s > _DURATION_S:
            break
        num_new = 1
        while draw.random() < 0.5:
            num_new += 1
        ids = [*ids, *range(next_id, next_id + num_new)]
        next_id += num_new
        last_tokens = draw.randint(1, TOKENS_PER_ID)
        requests.append(
            TraceRequest(1e3 * time_s, TOKENS_PER_ID * (len(ids) - 1) + last_tokens, draw.randint(20, 400), tuple(ids))
        )
        if draw.random() >= _END_PROBABILITY:
            heapq.heappush(due, (time_s + draw.expovariate(1 / _PAUSE_S), session, ids))
    return requests
