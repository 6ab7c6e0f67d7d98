"""Attacks that hold many leases."""

from __future__ import annotations

import itertools

from bench.hostile.attacks.attack import LONG_TOKENS, Figures, Target
from bench.hostile.attacks.flood import PREFILL, send_all
from radixkv.v1 import prefill_pb2

_NUM_LEASES = 1500
_NUM_POOLS = 4
_POOL_TOKENS = 131_072  # the default
_POOL_PROMPT_TOKENS = 1024


async def held_prompt(target: Target) -> Figures:
    """Hold 1,500 leases of one prompt of 131,072 tokens."""
    message = prefill_pb2.PrefillRequest(token_ids=[5] * target.scaled(LONG_TOKENS), tenant="holder", hold_lease=True)
    messages = itertools.repeat(message.SerializeToString(), target.scaled(_NUM_LEASES))
    return await send_all(target.address, PREFILL, messages)


async def held_pool(target: Target) -> Figures:
    """Hold leases of different prompts of 1,024 tokens, which would fill four pools of the default size."""
    num_prompts = _NUM_POOLS * _POOL_TOKENS // _POOL_PROMPT_TOKENS
    prompts = (
        prefill_pb2.PrefillRequest(
            token_ids=[1 + number // 200, 1 + number % 200] * (_POOL_PROMPT_TOKENS // 2),
            tenant="holder",
            hold_lease=True,
        ).SerializeToString()
        for number in range(num_prompts)
    )
    return await send_all(target.address, PREFILL, prompts)
