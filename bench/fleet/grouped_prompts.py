"""Groups of prompts with a common prefix, as in the routing benchmark of llm-d, and the outcomes of sending them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from bench.parts.report import distribution
from radixkv.service.client import Client

_VOCABULARY = 500
_TENANT = "acme"
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the traffic.

    llm-d's benchmark has 150 groups of 5 prompts. Each prompt has 6,000 shared and 1,200 further tokens, and 1,000
    tokens are generated after it.

    Attributes:
        groups: number of groups.
        prompts: prompts per group.
        prefix_tokens: tokens that the prompts of a group share.
        question_tokens: further tokens of each prompt.
        new_tokens: tokens to generate after each prompt.
    """

    groups: int
    prompts: int
    prefix_tokens: int
    question_tokens: int
    new_tokens: int

    def make_prompts(self, seed: int = 0) -> list[list[int]]:
        """Return all prompts in the order in which they are sent: shuffled. The same seed gives the same prompts."""
        all_prompts = []
        for group in range(self.groups):
            prefix = _draw_tokens(f"{seed} {group}", self.prefix_tokens)
            all_prompts += [
                prefix + _draw_tokens(f"{seed} {group} {index}", self.question_tokens) for index in range(self.prompts)
            ]
        random.Random(seed).shuffle(all_prompts)
        return all_prompts


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """Answer to one prompt, or its failure.

    Attributes:
        sent_s: seconds from the start of the pass until the prompt was sent; in an open loop, its arrival time.
        ttft_s: seconds from `sent_s` to the first token; None if none arrived.
        total_s: seconds from `sent_s` to the end of the call.
        token_ids: the generated tokens that arrived.
        cached_tokens: cached tokens of the prompt.
        error: the error of the call; empty if it succeeded.
    """

    sent_s: float
    ttft_s: float | None
    total_s: float
    token_ids: tuple[int, ...]
    cached_tokens: int
    error: str = ""


def run_pass(
    address: str,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    concurrency: int,
    on_outcome: Callable[[int], None] = lambda num: None,
    arrivals_s: Sequence[float] | None = None,
) -> list[PromptOutcome]:
    """Send all prompts, in a closed or an open loop, and return the outcomes in the same order.

    Args:
        address: address of the fleet.
        prompts: token ids.
        new_tokens: tokens to generate after each prompt.
        concurrency: maximum number of prompts in flight.
        on_outcome: is called after each prompt with the number of prompts that have ended.
        arrivals_s: seconds from the start of the pass until each prompt is sent; None for a closed loop.
    """
    start_s, num_ended, lock = time.monotonic(), 0, threading.Lock()
    with Client(address, timeout_s=_TIMEOUT_S) as client, ThreadPoolExecutor(concurrency) as threads:

        def ask(prompt: Sequence[int], arrival_s: float | None) -> PromptOutcome:
            nonlocal num_ended
            outcome = ask_one(client, prompt, new_tokens, start_s, arrival_s)
            with lock:
                num_ended += 1
                num_ended_now = num_ended
            on_outcome(num_ended_now)
            return outcome

        return list(threads.map(ask, prompts, arrivals_s or [None] * len(prompts)))


def random_arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Return times in seconds at which prompts arrive, `rate` per second on average: a Poisson process."""
    draw = random.Random(seed)
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def ask_one(
    client: Client, prompt: Sequence[int], new_tokens: int, start_s: float = 0.0, arrival_s: float | None = None
) -> PromptOutcome:
    """Generate greedily after one prompt.

    Args:
        client: client of the fleet.
        prompt: token ids.
        new_tokens: tokens to generate.
        start_s: start of the pass, on the clock of `time.monotonic`.
        arrival_s: seconds from the start of the pass until the prompt is sent; None to send it now.
    """
    sent_time_s, first_time_s, cached_tokens, error = time.monotonic(), None, 0, ""
    if arrival_s is not None:
        sent_time_s = start_s + arrival_s
        time.sleep(max(0.0, sent_time_s - time.monotonic()))
    token_ids: list[int] = []
    try:
        for chunk in client.generate(prompt, tenant=_TENANT, max_new_tokens=new_tokens, ignore_eos=True):
            if chunk.token_ids:
                first_time_s = first_time_s or time.monotonic()
            token_ids += chunk.token_ids
            cached_tokens = max(cached_tokens, chunk.usage.cached_tokens)
    except grpc.RpcError as failure:
        error = str(failure)
    total_s = time.monotonic() - sent_time_s
    ttft_s = None if first_time_s is None else first_time_s - sent_time_s
    return PromptOutcome(sent_time_s - start_s, ttft_s, total_s, tuple(token_ids), cached_tokens, error)


def summarize(outcomes: Sequence[PromptOutcome], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the counts and times of a pass. Tokens and times to first token are those of answered prompts only."""
    ttfts_ms = [1e3 * each.ttft_s for each in outcomes if each.ttft_s is not None and not each.error]
    prompt_tokens = sum(len(prompt) for each, prompt in zip(outcomes, prompts, strict=True) if not each.error)
    cached_tokens = sum(each.cached_tokens for each in outcomes if not each.error)
    return {
        "requests": len(outcomes),
        "errors": sum(bool(each.error) for each in outcomes),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "token_hit_rate": cached_tokens / max(1, prompt_tokens),
        "ttft_ms": distribution(ttfts_ms) if ttfts_ms else None,
        "seconds": max((each.sent_s + each.total_s for each in outcomes), default=0.0),
    }


def _draw_tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(_VOCABULARY), k=count)
