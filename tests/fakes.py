"""Fakes that make test inputs readable: prompts spelled as text, and a clock that tests set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.cache.lease import Lease
from radixkv.cache.node import Owner
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tenants import Quota, TenantUsage
from radixkv.namespace import Namespace

MODEL = Namespace("model")


def spell(text: str) -> bytes:
    """Make a prompt with one token per character."""
    return np.array([ord(character) for character in text], dtype="<u4").tobytes()


def make_tree(block_size: int) -> RadixTree:
    return RadixTree(Owner(MODEL, TenantUsage("", Quota()), block_size))


def packed(*block_ids: int) -> bytes:
    """Return block ids as nodes of the radix tree store them: int32 bytes."""
    return np.array(block_ids, dtype=np.int32).tobytes()


def publish(cache: PrefixCache, text: str, namespace: Namespace = MODEL) -> list[int]:
    """Cache a whole prompt and return its blocks."""
    with cache.lease(namespace, spell(text)) as lease:
        lease.commit(len(text))
        return lease.block_ids.tolist()


def lease_text(cache: PrefixCache, text: str, namespace: Namespace = MODEL) -> Lease:
    return cache.lease(namespace, spell(text))


def cached(cache: PrefixCache, text: str, namespace: Namespace = MODEL) -> int:
    """Count the tokens of `text` that are cached, including the last one."""
    return cache.match(namespace, spell(text + "\0")).cached_tokens


def num_shared_tokens(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two texts, or of two lists of token ids."""
    num_tokens = 0
    while num_tokens < min(len(first), len(second)) and first[num_tokens] == second[num_tokens]:
        num_tokens += 1
    return num_tokens


class FakeClock:
    """A clock that stands still until a test sets `now_s`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
