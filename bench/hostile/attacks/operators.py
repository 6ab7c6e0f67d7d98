"""Attacks with calls that need no forward pass, over cache contents that make such calls slow."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

from bench.hostile.attacks.attack import LONG_TOKENS, Figures, Target
from bench.hostile.attacks.flood import PREFILL, PROBE, PURGE, RETAIN, STATS, flood, send_all
from radixkv.v1 import cache_pb2, prefill_pb2

_NUM_TENANTS = 40_000
_NUM_PRIORITIES = 40_000
_PACE_DIVISOR = 50  # a fiftieth as many prompts are timed first, to estimate how long all prompts take
_BLOCK_TOKENS = 16  # as in LARGE_POOL
_SLACK = 1.5  # factor on the estimated time for sending all prompts
_NUM_AT_ONCE = 48

_PREPARED_AT_ONCE = 64


async def fill_tenants(target: Target) -> Figures:
    """Cache a prompt of two tokens for each of 40,000 tenants."""
    return await send_all(target.address, PREFILL, _tenant_prompts(target.scaled(_NUM_TENANTS)), _PREPARED_AT_ONCE)


async def ask_statistics(target: Target) -> Figures:
    """Request statistics in a loop, with eight concurrent calls."""
    return await flood(target, STATS, lambda: b"", 8)


async def purge(target: Target) -> Figures:
    """Purge a tenant that has cached nothing, in a loop."""
    message = cache_pb2.PurgeRequest(tenant="unknown").SerializeToString()
    return await flood(target, PURGE, lambda: message, _NUM_AT_ONCE)


async def fill_prompt(target: Target) -> Figures:
    """Cache a prompt of 131,072 tokens."""
    message = prefill_pb2.PrefillRequest(token_ids=[5] * LONG_TOKENS, tenant="operator")
    return await send_all(target.address, PREFILL, iter([message.SerializeToString()]))


async def probe(target: Target) -> Figures:
    """Probe a cached prompt of 131,072 tokens, with 48 concurrent calls."""
    message = prefill_pb2.ProbeRequest(token_ids=[5] * LONG_TOKENS, tenant="operator").SerializeToString()
    return await flood(target, PROBE, lambda: message, _NUM_AT_ONCE)


async def retain(target: Target) -> Figures:
    """Retain 64 blocks of a cached prompt of 131,072 tokens, one per call, with 48 concurrent calls."""
    starts = range(0, LONG_TOKENS, LONG_TOKENS // 64)
    messages = itertools.cycle([_retain_request(start).SerializeToString() for start in starts])
    return await flood(target, RETAIN, lambda: next(messages), _NUM_AT_ONCE)


async def fill_priorities(target: Target) -> Figures:
    """Cache 40,000 blocks whose priorities expire at the same time, soon after the last of them is cached."""
    loop = asyncio.get_running_loop()
    num_blocks = target.scaled(_NUM_PRIORITIES)
    start_s, num_timed = loop.time(), -(-num_blocks // _PACE_DIVISOR)
    await send_all(target.address, PREFILL, _tenant_prompts(num_timed), _PREPARED_AT_ONCE)
    expiry_s = loop.time() + target.seconds + _SLACK * num_blocks / num_timed * (loop.time() - start_s)

    def prompts() -> Iterator[bytes]:
        for index in range(num_blocks):
            tokens = [1 + index // 200, 1 + index % 200, *[3] * (_BLOCK_TOKENS - 2)]
            message = prefill_pb2.PrefillRequest(token_ids=tokens, tenant="priorities")
            message.retention.priority = 40
            message.retention.ttl.FromMilliseconds(max(1, round((expiry_s - loop.time()) * 1000)))
            yield message.SerializeToString()

    observed = await send_all(target.address, PREFILL, prompts(), _PREPARED_AT_ONCE)
    late_s = max(0.0, loop.time() - expiry_s)
    # The attack begins after the preparation, so the priorities expire in its middle.
    await asyncio.sleep(max(0.0, expiry_s - target.seconds / 2 - loop.time()))
    return {**observed, "prepared late s": late_s}


async def watch_expiry(target: Target) -> Figures:
    """Request statistics twice per second while the priorities expire."""
    observed: dict[str, float] = {}
    for _ in range(max(1, round(2 * target.seconds))):
        for status, number in (await send_all(target.address, STATS, iter([b""]), 1)).items():
            observed[status] = observed.get(status, 0) + number
        await asyncio.sleep(0.5)
    return observed


def _tenant_prompts(num_tenants: int) -> Iterator[bytes]:
    for index in range(num_tenants):
        yield prefill_pb2.PrefillRequest(token_ids=[1, 2], tenant=f"tenant {index}").SerializeToString()


def _retain_request(start: int) -> cache_pb2.RetainRequest:
    message = cache_pb2.RetainRequest(token_ids=[5] * LONG_TOKENS, tenant="operator")
    message.retention.priority = 49
    message.retention.start_token, message.retention.end_token = start, start + _BLOCK_TOKENS
    return message
