"""Attacks that hold many leases."""

from __future__ import annotations

import itertools

from bench.hostile.attacks.attack import LONG_TOKENS, Figures, Target
from bench.hostile.attacks.flood import PREFILL, send_all
from radixkv.v1 import prefill_pb2

_NUM_LEASES = 1500
_NUM_POOLS = 4


async def held_prompt(target: Target) -> Figures:
    """Hold 1,500 leases of one prompt of 131,072 tokens."""
    message = prefill_pb2.PrefillRequest(token_ids=[5] * target.part_of(LONG_TOKENS), tenant="holder", hold_lease=True)
    messages = itertools.repeat(message.SerializeToString(), target.part_of(_NUM_LEASES))
    return await send_all(target.address, PREFILL, messages)


async def held_pool(target: Target) -> Figures:
    """Hold leases of different prompts of 1,024 tokens, which would fill four pools of the default size."""
    numbers = range(_NUM_POOLS * 131_072 // 1024)
    prompts = (
        prefill_pb2.PrefillRequest(
            token_ids=[1 + number // 200, 1 + number % 200] * 512, tenant="holder", hold_lease=True
        ).SerializeToString()
        for number in numbers
    )
    return await send_all(target.address, PREFILL, prompts)
