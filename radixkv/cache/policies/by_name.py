"""The eviction policies that can be chosen by name."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.policies.adaptive import BestOfThreeOrders
from radixkv.cache.policies.classic import LeastFrequentlyUsed, LeastRecentlyUsed, SegmentedLeastRecentlyUsed
from radixkv.cache.policies.policy import EvictionPolicy

_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "adaptive": BestOfThreeOrders,
    "lru": lambda _: LeastRecentlyUsed(),
    "slru": lambda _: SegmentedLeastRecentlyUsed(),
    "lfu": lambda _: LeastFrequentlyUsed(),
    "priority": lambda _: LeastRecentlyUsed(),  # every policy obeys priorities; a name that others use
}


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """Make a policy for one cache.

    Args:
        name: one of `radixkv.config.EVICTION_POLICIES`.
        num_blocks: blocks in the pool of that cache.
    """
    return _POLICIES[name](num_blocks)
