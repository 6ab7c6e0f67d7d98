"""Looks up prompts that are cached in one namespace in other, slightly different namespaces."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from radixkv.api.miss_reason import MissReason
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import Namespace

# Names that a careless key would join, case-fold or normalize to the same string.
_TENANTS = ("", "a", "ab", "A", "a\0b", "caf\u00e9", "cafe\u0301")
_ADAPTERS = ("", "b", "bc", "a")
_SALTS = ("", "c", "b", "a")
NAMESPACES = [
    Namespace(*names) for names in itertools.product(("model", "mode", "model:int8"), _TENANTS, _ADAPTERS, _SALTS)
]

_BLOCK_TOKENS = 16
_NUM_BLOCKS = 512
_HEAD_TOKENS = 24
_TAIL_TOKENS = 40
_NUM_OTHERS = 20
_LEAKING_REASONS = (MissReason.EVICTED, MissReason.EXPIRED)


@dataclass(frozen=True, slots=True)
class Isolation:
    """The outcome of all trials.

    Attributes:
        trials: look-ups in a namespace in which the prompt was never cached.
        cross_hits: those of the `trials` that found more than the head, which this namespace cached itself, or that
            reported an eviction.
        controls: look-ups in the namespace in which the prompt is cached.
        control_hits: those of the `controls` that found it.
    """

    trials: int
    cross_hits: int
    controls: int
    control_hits: int


def search(num_trials: int, seed: int) -> Isolation:
    """Publish new prompts, each in one namespace, and look each up there and in 20 others, while old ones are evicted.

    All prompts begin with the same head, in all namespaces. So no tree is empty by chance, and only one namespace has
    cached the tokens after the head.
    """
    rng = np.random.default_rng(seed)
    cache = PrefixCache(_NUM_BLOCKS, _BLOCK_TOKENS)
    head = rng.integers(0, 50_000, _HEAD_TOKENS).astype("<u4").tobytes()
    trials = cross_hits = controls = control_hits = 0
    while trials < num_trials:
        order = rng.choice(len(NAMESPACES), 1 + min(_NUM_OTHERS, num_trials - trials), replace=False)
        owner, *others = (NAMESPACES[index] for index in order)
        tail = rng.integers(0, 50_000, _TAIL_TOKENS).astype("<u4")
        tail[0] = controls  # so that no two prompts share more than the head by chance
        prompt = head + tail.tobytes()
        num_tokens = len(prompt) // 4
        with cache.lease(owner, prompt) as lease:
            lease.commit(num_tokens)
        controls += 1
        # A match leaves the last token of a prompt to be computed.
        control_hits += cache.match(owner, prompt).cached_tokens == num_tokens - 1
        for other in others:
            trials += 1
            cross_hits += _reveals_prompt(cache, other, prompt)
    return Isolation(trials, cross_hits, controls, control_hits)


def _reveals_prompt(cache: PrefixCache, namespace: Namespace, prompt: bytes) -> bool:
    """Whether the cache reveals more of a prompt than its head to a namespace that cached at most the head."""
    cached_tokens = cache.match(namespace, prompt).cached_tokens
    if cached_tokens > _HEAD_TOKENS:
        return True
    # If not even the first block is cached, the missing block belongs to the head, and the namespace's own copy of it
    # may have been evicted.
    return cached_tokens >= _BLOCK_TOKENS and cache.explain(namespace, prompt, cached_tokens) in _LEAKING_REASONS
