"""A synthetic trace of agents that call tools, with documented statistics."""

from __future__ import annotations

import heapq
import itertools
import random

from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest

_NUM_TOOLS = 2000
_TURN_STOPS = 0.25
_PAUSE_S = 300.0


def agents_trace(num_requests: int = 24_000, *, seconds: float = 3600.0, seed: int = 0) -> list[TraceRequest]:
    """Make an hour of sessions of agents, the same for the same arguments.

    - A session belongs to one of 2,000 tool sets, the k-th most popular with a chance in proportion to 1/k. Its prompts
      begin with that set's description: 2 to 40 blocks of 512 tokens, evenly drawn for each set.
    - It begins at an even random time, and continues with a probability of 3/4 after each request: 4 on average.
    - Each request adds the session's next tokens: 1 block and, with a chance of 1/2 each, one more, so 2 in the mean;
      the last block is filled to an even random part. The next one comes after an exponential pause of 300 s.

    Args:
        num_requests: four times the number of sessions; requests are fewer, because the end cuts some off.
        seconds: time over which sessions begin. What comes after it is left out.
        seed: of everything.

    Returns:
        Requests in the order of their times.
    """
    draw = random.Random(seed)
    sizes = [draw.randint(2, 40) for _ in range(_NUM_TOOLS)]
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(_NUM_TOOLS)))
    next_id = sum(sizes)
    firsts = [sum(sizes[:tool]) for tool in range(_NUM_TOOLS)]
    due: list[tuple[float, int, list[int]]] = []
    for session in range(round(num_requests * _TURN_STOPS)):
        tool = draw.choices(range(_NUM_TOOLS), cum_weights=weights)[0]
        ids = list(range(firsts[tool], firsts[tool] + sizes[tool]))
        heapq.heappush(due, (draw.random() * seconds, session, ids))
    requests: list[TraceRequest] = []
    while due and len(requests) < num_requests:
        time_s, session, ids = heapq.heappop(due)
        if time_s > seconds:
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
        if draw.random() >= _TURN_STOPS:
            heapq.heappush(due, (time_s + draw.expovariate(1 / _PAUSE_S), session, ids))
    return requests
