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

_BLOCK = 16
_NUM_BLOCKS = 512
_HEAD_TOKENS = 24
_TAIL_TOKENS = 40
_OTHERS = 20
_LEAKING = (MissReason.EVICTED, MissReason.EXPIRED)


@dataclass(frozen=True, slots=True)
class Isolation:
    """The outcome of all trials.

    Attributes:
        trials: look-ups in a namespace that never had the prompt.
        cross_hits: those that found more than this namespace's own head of it, or reported an eviction.
        controls: look-ups in the namespace that has the prompt.
        control_hits: those that found it.
    """

    trials: int
    cross_hits: int
    controls: int
    control_hits: int


def search(num_trials: int, seed: int) -> Isolation:
    """Publish new prompts, each in one namespace, and look each up there and in 20 others, while old ones are evicted.

    All prompts of a namespace, and of all namespaces, begin with the same head. So trees are never empty by chance,
    and what follows the head is known to one namespace alone.
    """
    numbers = np.random.default_rng(seed)
    cache = PrefixCache(_NUM_BLOCKS, _BLOCK)
    head = numbers.integers(0, 50_000, _HEAD_TOKENS).astype("<u4").tobytes()
    trials = cross_hits = controls = control_hits = 0
    while trials < num_trials:
        order = numbers.choice(len(NAMESPACES), 1 + min(_OTHERS, num_trials - trials), replace=False)
        owner, *others = (NAMESPACES[index] for index in order)
        tail = numbers.integers(0, 50_000, _TAIL_TOKENS).astype("<u4")
        tail[0] = controls  # no two prompts share it by chance
        prompt = head + tail.tobytes()
        num_tokens = len(prompt) // 4
        with cache.lease(owner, prompt) as lease:
            lease.commit(num_tokens)
        controls += 1
        control_hits += cache.match(owner, prompt).cached_tokens == num_tokens - 1
        for other in others:
            trials += 1
            cross_hits += _is_told(cache, other, prompt)
    return Isolation(trials, cross_hits, controls, control_hits)


def _is_told(cache: PrefixCache, namespace: Namespace, prompt: bytes) -> bool:
    """Whether a namespace that has at most the head of a prompt learns more of it."""
    cached_tokens = cache.match(namespace, prompt).cached_tokens
    if cached_tokens > _HEAD_TOKENS:
        return True
    # Without the first block, the next one is of the head, which this namespace may have lost itself.
    return cached_tokens >= _BLOCK and cache.explain(namespace, prompt, cached_tokens) in _LEAKING
