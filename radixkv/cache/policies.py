"""The eviction policies that can be chosen by name."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.adaptive_policy import AdaptivePolicy
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.node import Node


class LeastRecentlyUsed(EvictionPolicy):
    """Evict the leaf whose last lease began or ended the longest time ago."""

    def are_alike(self, upper: Node, lower: Node) -> bool:
        """Return True: only the time of the last use matters."""
        return True


class SegmentedLeastRecentlyUsed(EvictionPolicy):
    """Evict leaves that were never reused before all others, in each group the least recently used one first.

    Source: Karedla, Love, Wherry: "Caching strategies to improve disk system performance", 1994. Here it is a sort key,
    as in SGLang, so the protected segment has no bound.
    """

    def key(self, node: Node) -> tuple[bool, float]:
        """Return whether the node was reused, and the time of its last use."""
        return node.num_uses > 0, node.last_used_s


class LeastFrequentlyUsed(EvictionPolicy):
    """Evict the leaf with the fewest uses; among equals, the least recently used one."""

    def key(self, node: Node) -> tuple[int, float]:
        """Return the number of uses, and the time of the last one."""
        return node.num_uses, node.last_used_s


_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "adaptive": AdaptivePolicy,
    "lru": lambda _: LeastRecentlyUsed(),
    "slru": lambda _: SegmentedLeastRecentlyUsed(),
    "lfu": lambda _: LeastFrequentlyUsed(),
    "priority": lambda _: LeastRecentlyUsed(),  # every policy obeys priorities; other systems use this name
}


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """Make a policy for one cache.

    Args:
        name: one of `radixkv.config.EVICTION_POLICIES`.
        num_blocks: blocks in the pool of that cache.
    """
    return _POLICIES[name](num_blocks)
