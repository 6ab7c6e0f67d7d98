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
    "priority": lambda _: LeastRecentlyUsed(),  # priorities come first in every order; a name that others have
}


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """Make a policy for one cache of so many blocks.

    Args:
        name: one of `radixkv.config.EVICTION_POLICIES`.
        num_blocks: blocks of the cache's pool.
    """
    return _POLICIES[name](num_blocks)
