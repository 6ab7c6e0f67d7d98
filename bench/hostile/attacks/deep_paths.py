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

_BLOCK_TOKENS = 16  # as in LARGE_POOL
_OTHER_TOKEN_ID = 201  # not in the prompt, whose token ids are below 200
_NUM_TIMED = 20
_RETAIN_AT_ONCE = 32
_BRANCHES_AT_ONCE = 48
_NUM_BRANCHES = 2000


@cache
def _tokens() -> npt.NDArray[np.uint32]:
    return np.random.default_rng(7).integers(1, 200, LONG_TOKENS).astype("<u4")


@cache
def _long_prompt_message() -> bytes:
    return _prompt_message(_tokens())


async def cut_by_retain(target: Target) -> Figures:
    """Cache one prompt, and split it into 8,192 nodes by retaining every second block of it."""
    ends = range(2 * _BLOCK_TOKENS, LONG_TOKENS + 1, 2 * _BLOCK_TOKENS)
    return await _split_path(target, RETAIN, _retain_messages(list(ends)[: target.scaled(len(ends))]))


async def cut_by_branches(target: Target) -> Figures:
    """Cache one prompt, and split it by 2,000 prompts that diverge from it, each one block later."""
    return await _split_path(target, PREFILL, _branch_messages(target.scaled(_NUM_BRANCHES)))


async def hit_after_retain(target: Target) -> Figures:
    """Send the prompt that `cut_by_retain` has cached, with 32 concurrent calls."""
    return await flood(target, PREFILL, _long_prompt_message, _RETAIN_AT_ONCE)


async def hit_after_branches(target: Target) -> Figures:
    """Send the prompt that `cut_by_branches` has cached, with 48 concurrent calls."""
    return await flood(target, PREFILL, _long_prompt_message, _BRANCHES_AT_ONCE)


async def _split_path(target: Target, path: str, messages: Iterator[bytes]) -> Figures:
    """Time hits of the prompt, send the messages that split its path, and time hits again."""
    whole_ms = await _median_hit_ms(target.address)
    statuses = await send_all(target.address, path, messages)
    cut_ms = await _median_hit_ms(target.address)
    async with open_channel(target.address) as channel:
        stats = cache_pb2.StatsResponse.FromString(await channel.unary_unary(STATS, None, None)(b"", timeout=TIMEOUT_S))
    return {
        "nodes": stats.segments,
        "whole_hit_ms": whole_ms,
        "cut_hit_ms": cut_ms,
        **{f"prepared {name}": number for name, number in statuses.items()},
    }


async def _median_hit_ms(address: str) -> float:
    took_ms = []
    async with open_channel(address) as channel:
        call, message = channel.unary_unary(PREFILL, None, None), _long_prompt_message()
        await call(message, timeout=TIMEOUT_S)
        for _ in range(_NUM_TIMED):
            start_s = time.perf_counter()
            await call(message, timeout=TIMEOUT_S)
            took_ms.append((time.perf_counter() - start_s) * 1000)
    return statistics.median(took_ms)


def _prompt_message(tokens: npt.NDArray[np.uint32]) -> bytes:
    message = prefill_pb2.PrefillRequest(tenant="deep")
    write_token_ids(message, tokens.tobytes())
    return message.SerializeToString()


def _retain_messages(ends: list[int]) -> Iterator[bytes]:
    for end in ends:
        message = cache_pb2.RetainRequest(tenant="deep")
        write_token_ids(message, _tokens()[:end].tobytes())
        message.retention.priority = 49
        message.retention.start_token, message.retention.end_token = end - _BLOCK_TOKENS, end
        yield message.SerializeToString()


def _branch_messages(num_branches: int) -> Iterator[bytes]:
    for index in range(1, num_branches + 1):
        yield _prompt_message(
            np.append(_tokens()[: index * _BLOCK_TOKENS], np.full(_BLOCK_TOKENS, _OTHER_TOKEN_ID, "<u4"))
        )
