"""Synthetic conversations, and the errors of estimates of how many tokens twice a ceiling would save.

The truth is a replay of the conversations through the cache.

python -m tests.statements.conversations
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.namespace import Namespace
from radixkv.statements import quota_shadow
from radixkv.statements.quota_shadow import PrefixHashes, QuotaShadow
from radixkv.tokens import TOKEN_BYTES
from tests.fakes import FakeClock

SIZE = 16  # tokens per block
ACME = Namespace("m", "acme")
POLICIES = ("lru", "adaptive")
_NUM_POOL_BLOCKS = 60_000


def conversations(seed: int, num_requests: int, num_live: int = 300) -> list[bytes]:
    """Return prompts of conversations whose turns continue each other, after one of thirty system prompts."""
    dice = random.Random(seed)
    systems = [[dice.randrange(2**20) for _ in range(dice.choice((64, 200, 500)))] for _ in range(30)]
    live: list[list[int]] = []  # the conversations that may continue, the oldest first
    prompts = []
    for _ in range(num_requests):
        if live and dice.random() < 0.8:
            index = int(len(live) * dice.random() ** 0.5)  # rather a new conversation than an old one
            chat = live[min(index, len(live) - 1)]
        else:
            index = int(dice.paretovariate(0.7)) - 1  # a few system prompts are used most
            chat = list(systems[min(29, index)])
            live = [*live[-num_live + 1 :], chat]
        chat += [dice.randrange(2**20) for _ in range(dice.randint(20, 150))]
        if len(chat) > 3000:
            live.remove(chat)
        prompts.append(np.array(chat, "<u4").tobytes())
    return prompts


def count_saved_tokens(prompts: Sequence[bytes], ceiling_blocks: int, policy: str) -> int:
    """Replay prompts through a cache in which one tenant has a ceiling, and return the tokens that hits saved."""
    clock = FakeClock()
    quotas = {"acme": Quota(ceiling_blocks=ceiling_blocks)}
    cache = PrefixCache(
        _NUM_POOL_BLOCKS, SIZE, policy=make_policy(policy, _NUM_POOL_BLOCKS), quotas=quotas, clock=clock
    )
    num_saved_tokens = 0
    for prompt in prompts:
        clock.now_s += 1.0
        with cache.lease(ACME, prompt) as lease:
            num_saved_tokens += lease.cached_tokens
            lease.commit(lease.num_tokens)
    return num_saved_tokens


def true_share(prompts: Sequence[bytes], ceiling_blocks: int, policy: str) -> float:
    """Return the share of the prompt tokens that only twice the ceiling saves."""
    num_at_ceiling = count_saved_tokens(prompts, ceiling_blocks, policy)
    num_at_twice_ceiling = count_saved_tokens(prompts, 2 * ceiling_blocks, policy)
    return (num_at_twice_ceiling - num_at_ceiling) / (sum(map(len, prompts)) // TOKEN_BYTES)


def estimated_share(prompts: Sequence[bytes], shadow: QuotaShadow, seed: int) -> float:
    """Return the estimate of `true_share`, with a sample that depends on the seed."""
    hashes = PrefixHashes()
    hashes._random = np.random.default_rng(seed)
    num_estimated_tokens = 0
    for prompt in prompts:
        prefix_hashes = hashes.compute(prompt, ACME.seed)
        num_estimated_tokens += shadow.replay(prefix_hashes, prefix_hashes.size, prefix_hashes.size)
    return num_estimated_tokens / (sum(map(len, prompts)) // TOKEN_BYTES)


def main() -> None:
    errors: dict[int, list[float]] = {}  # by number of sampled blocks
    for seed in (11, 12, 13):
        for num_requests, num_live, ceilings in (2500, 300, (1500, 3000)), (6000, 1200, (6000, 12_000)):
            prompts = conversations(seed, num_requests, num_live)
            for ceiling in ceilings:
                truths = [true_share(prompts, ceiling, policy) for policy in POLICIES]
                for max_sampled_blocks in (16_384, 8192, 4096, 2048):
                    quota_shadow.MAX_SAMPLED_BLOCKS = max_sampled_blocks
                    # If all blocks of twice the ceiling are sampled, all samples are equal.
                    for sample in range(3 if 2 * ceiling > max_sampled_blocks else 1):
                        shadow = QuotaShadow(ceiling, SIZE)
                        estimate = estimated_share(prompts, shadow, 100 * seed + sample)
                        errors.setdefault(shadow._large.max_blocks, []).extend(
                            abs(estimate - truth) for truth in truths
                        )
    for num_blocks, of_size in sorted(errors.items()):
        mean = sum(of_size) / len(of_size)
        print(
            f"{num_blocks:6} sampled blocks: {len(of_size):3} errors, mean {mean:.4f}, max {max(of_size):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
