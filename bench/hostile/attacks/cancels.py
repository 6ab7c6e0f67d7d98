"""Attacks that cancel calls."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from bench.hostile.attacks.attack import Figures, Target
from bench.hostile.attacks.flood import PREFILL, open_channel
from radixkv.v1 import prefill_pb2

_NUM_AT_ONCE = 48
_MAX_DELAY_S = 0.01


async def cancels(target: Target) -> Figures:
    """Begin calls, and cancel each within 10 ms."""
    clock, rng = asyncio.get_running_loop().time, random.Random(3)
    end_s = clock() + target.seconds
    observed: Counter[str] = Counter()

    async def repeat() -> None:
        async with open_channel(target.address) as channel:
            call = channel.unary_unary(PREFILL, None, None)
            while clock() < end_s:
                tokens = [rng.randrange(1, 200) for _ in range(64)]
                running_call = call(prefill_pb2.PrefillRequest(token_ids=tokens, tenant="cancels").SerializeToString())
                await asyncio.sleep(rng.random() * _MAX_DELAY_S)
                running_call.cancel()
                observed[(await running_call.code()).name] += 1

    await asyncio.gather(*(repeat() for _ in range(_NUM_AT_ONCE)))
    return dict(observed)
