"""Generates the prompts of a replay and their arrival times, which are the same on every machine."""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from radixkv.errors import ConfigError
from radixkv.planning.trace import TraceRequest, block_tokens, prompt_tokens
from radixkv.tokens import TOKEN_BYTES, shared_bytes

MAX_SEED = 2**30  # seeds of traffic are below; this one is that of `unrelated_prompts`
_ARRIVALS_INDEX = 2**32 - 1  # no prompt has this index


PublicTokens = dict[tuple[str, bytes], npt.NDArray[np.uint32]]
"""The tokens of each public prefix, by the name of its adapter and its bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """One request to send.

    Attributes:
        arrival_s: time to send it, counted from the start of the pass. A closed loop ignores it.
        token_ids: uint32 `[prompt_tokens]`.
        tenant: suffix that is appended to the tenant of the pass.
        adapter: name of its adapter; empty for the model itself.
    """

    arrival_s: float
    token_ids: npt.NDArray[np.uint32]
    tenant: str = ""
    adapter: str = ""


def shared_prefix(
    num_requests: int, prefix_tokens: int, suffix_tokens: int, groups: int, vocab_size: int, seed: int
) -> list[WorkItem]:
    """Generate traffic with system prompts: request `i` has the prefix of group `i % groups` and its own suffix.

    Args:
        num_requests: at least 1.
        prefix_tokens: tokens that the requests of a group share; 0 for none.
        suffix_tokens: tokens that only this request has, at least 1.
        groups: number of different prefixes, at least 1.
        vocab_size: token ids are in `[0, vocab_size)`.
        seed: `[0, 2**30)`; each seed gives different tokens.

    Returns:
        Items that all arrive at the same time.
    """
    prefixes = [_random_tokens(seed, group, prefix_tokens, vocab_size) for group in range(min(groups, num_requests))]
    return [
        WorkItem(
            0.0, np.concatenate((prefixes[i % groups], _random_tokens(seed, groups + i, suffix_tokens, vocab_size)))
        )
        for i in range(num_requests)
    ]


def mooncake(requests: Sequence[TraceRequest], vocab_size: int, scale: float = 1.0) -> list[WorkItem]:
    """Generate the prompts of a trace, in its order. They arrive at its timestamps, relative to the earliest one."""
    start_ms = min(request.timestamp_ms for request in requests)
    return [
        WorkItem((request.timestamp_ms - start_ms) / 1000, prompt_tokens(request, vocab_size=vocab_size, scale=scale))
        for request in requests
    ]


def unrelated_prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> list[npt.NDArray[np.uint32]]:
    """Generate prompts for a warm-up that share no prefix with each other or with the traffic of any seed."""
    return [_random_tokens(MAX_SEED, index, num_tokens, vocab_size) for index in range(num_prompts)]


def poisson_arrivals(items: Sequence[WorkItem], rate_per_s: float, seed: int) -> list[WorkItem]:
    """Assign the arrival times of a Poisson process to the items, in order; the first one arrives at 0."""
    draws = block_tokens(_stream_id(seed, _ARRIVALS_INDEX), tokens_per_id=len(items)).astype(np.float64)
    gaps_s = -np.log1p(-draws / 2**32) / rate_per_s  # [num_items]; draws / 2**32 is in [0, 1)
    arrivals_s = np.cumsum(gaps_s) - gaps_s[0]
    return [replace(item, arrival_s=float(arrival_s)) for item, arrival_s in zip(items, arrivals_s, strict=True)]


def trace_arrivals(items: Sequence[WorkItem], speedup: float) -> list[WorkItem]:
    """Order the items by arrival and divide arrival times by `speedup`."""
    in_order = sorted(items, key=lambda item: item.arrival_s)
    return [replace(item, arrival_s=item.arrival_s / speedup) for item in in_order]


def assign_in_turn(items: Sequence[WorkItem], num_adapters: int, num_tenants: int) -> list[WorkItem]:
    """Assign adapters to the items in turn, and tenants in turn to the items of each adapter."""
    return [
        replace(
            item,
            adapter=f"bench-{index % num_adapters}" if num_adapters else "",
            tenant=f"-{index // max(1, num_adapters) % num_tenants}" if num_tenants > 1 else "",
        )
        for index, item in enumerate(items)
    ]


def spread_order(num_items: int) -> list[int]:
    """Order indices so that the first `n` of them are spread evenly, whatever `n` is, beginning with index 0.

    Consecutive indices differ by the golden section of the number of items, modulo that number. Therefore a sample does
    not follow a periodic pattern of the traffic, such as groups in turn. Three rounds reach every index.
    """
    golden = (5**0.5 - 1) / 2
    return list(dict.fromkeys(int((step * golden) % 1 * num_items) for step in range(3 * num_items)))


def median_prompt_tokens(items: Sequence[WorkItem]) -> int:
    """Return the median length of the prompts, at least 1."""
    return int(statistics.median_high(len(item.token_ids) for item in items))


def public_tokens(items: Sequence[WorkItem], prefix_tokens: int) -> PublicTokens:
    """Return the distinct prefixes of a workload."""
    prefixes = ((item.adapter, item.token_ids[:prefix_tokens]) for item in items)
    return {(adapter, prefix.tobytes()): prefix for adapter, prefix in prefixes}


def count_reusable_tokens(items: Sequence[WorkItem], public: PublicTokens | None = None) -> int:
    """Count the tokens that prompts, served one by one, share with an earlier prompt of their namespace.

    A cache of infinite size would reuse exactly these. Public prefixes count as earlier than all prompts of their
    adapter. The last token of a prompt is always computed. In sorted order, the prompt with the longest common prefix
    is a neighbor.
    """
    earlier: dict[tuple[str, str], list[bytes]] = {}
    public_keys: defaultdict[str, list[bytes]] = defaultdict(list)
    for (adapter, _), tokens in (public or {}).items():
        insort(public_keys[adapter], tokens.astype(">u4").tobytes())
    num_reusable = 0
    for item in items:
        key = item.token_ids.astype(">u4").tobytes()
        earlier_keys = earlier.setdefault((item.tenant, item.adapter), public_keys[item.adapter].copy())
        position = bisect_left(earlier_keys, key)
        neighbors = earlier_keys[max(0, position - 1) : position + 1]
        shared_tokens = max((shared_bytes(neighbor, key, 0) // TOKEN_BYTES for neighbor in neighbors), default=0)
        num_reusable += min(shared_tokens, len(item.token_ids) - 1)
        insort(earlier_keys, key)
    return num_reusable


def _random_tokens(seed: int, index: int, num_tokens: int, vocab_size: int) -> npt.NDArray[np.uint32]:
    return block_tokens(_stream_id(seed, index), tokens_per_id=num_tokens, vocab_size=vocab_size)


def _stream_id(seed: int, index: int) -> int:
    """Return an id for `block_tokens`, which generates other tokens for each id."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed: expected 0 to {MAX_SEED - 1}, got {seed}")
    return (seed << 32) | index
