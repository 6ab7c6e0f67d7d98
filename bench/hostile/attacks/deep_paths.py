"""Attacks with long prompts whose tree path is split into many nodes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from bench.hostile.attacks.attack import LONG_TOKENS, Figures, Target
from bench.hostile.attacks.flood import PREFILL, RETAIN, STATS, TIMEOUT_S, flood, open_channel, send_all
from radixkv.service.token_ids import write_token_ids
from radixkv.v1 import cache_pb2, prefill_pb2

_BLOCK = 16
_NUM_TIMED = 20
_RETAIN_AT_ONCE = 32
_BRANCHES_AT_ONCE = 48
_NUM_BRANCHES = 2000


@cache
def _tokens() -> npt.NDArray[np.uint32]:
    return np.random.default_rng(7).integers(1, 200, LONG_TOKENS).astype("<u4")


@cache
def _long_prompt() -> bytes:
    return _prompt(_tokens())


async def cut_by_retain(target: Target) -> Figures:
    """Cache one prompt, and split it into 8,192 nodes by retaining every second block of it."""
    ends = range(2 * _BLOCK, LONG_TOKENS + 1, 2 * _BLOCK)
    return await _cut(target, RETAIN, _retains(list(ends)[: target.part_of(len(ends))]))


async def cut_by_branches(target: Target) -> Figures:
    """Cache one prompt, and split it by 2,000 prompts that diverge from it, each one block later."""
    return await _cut(target, PREFILL, _branches(target.part_of(_NUM_BRANCHES)))


async def hit_after_retain(target: Target) -> Figures:
    """Send the prompt in 32 concurrent calls."""
    return await flood(target, PREFILL, _long_prompt, _RETAIN_AT_ONCE)


async def hit_after_branches(target: Target) -> Figures:
    """Send the prompt in 48 concurrent calls."""
    return await flood(target, PREFILL, _long_prompt, _BRANCHES_AT_ONCE)


async def _cut(target: Target, path: str, messages: Iterator[bytes]) -> Figures:
    """Time hits of the prompt before and after its path is split."""
    whole_ms = await _hit_ms(target.address)
    statuses = await send_all(target.address, path, messages)
    cut_ms = await _hit_ms(target.address)
    async with open_channel(target.address) as channel:
        stats = cache_pb2.StatsResponse.FromString(await channel.unary_unary(STATS, None, None)(b"", timeout=TIMEOUT_S))
    return {
        "nodes": stats.segments,
        "whole_hit_ms": whole_ms,
        "cut_hit_ms": cut_ms,
        **{f"prepared {name}": number for name, number in statuses.items()},
    }


async def _hit_ms(address: str) -> float:
    took_ms = []
    async with open_channel(address) as channel:
        call, message = channel.unary_unary(PREFILL, None, None), _long_prompt()
        await call(message, timeout=TIMEOUT_S)
        for _ in range(_NUM_TIMED):
            start_s = time.perf_counter()
            await call(message, timeout=TIMEOUT_S)
            took_ms.append((time.perf_counter() - start_s) * 1000)
    return statistics.median(took_ms)


def _prompt(tokens: npt.NDArray[np.uint32]) -> bytes:
    message = prefill_pb2.PrefillRequest(tenant="deep")
    write_token_ids(message, tokens.tobytes())
    return message.SerializeToString()


def _retains(ends: list[int]) -> Iterator[bytes]:
    for end in ends:
        message = cache_pb2.RetainRequest(tenant="deep")
        write_token_ids(message, _tokens()[:end].tobytes())
        message.retention.priority = 49
        message.retention.start_token, message.retention.end_token = end - _BLOCK, end
        yield message.SerializeToString()


def _branches(number: int) -> Iterator[bytes]:
    for index in range(1, number + 1):
        yield _prompt(np.append(_tokens()[: index * _BLOCK], np.full(_BLOCK, 201, "<u4")))
