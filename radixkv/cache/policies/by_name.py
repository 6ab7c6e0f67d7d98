"""The eviction policies that can be chosen by name."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.eviction_lines import EvictionPolicy
from radixkv.cache.node import Node
from radixkv.cache.policies.adaptive import BestOfThreeOrders


class LeastRecentlyUsed(EvictionPolicy):
    """The leaf whose last lease began or ended longest ago goes first."""

    def key(self, node: Node) -> float:
        """Time of last use, in seconds."""
        return node.last_used_s


class SegmentedLeastRecentlyUsed(EvictionPolicy):
    """Leaves that were never reused go before all that were; the least recently used of each kind first.

    Source: Karedla, Love, Wherry: "Caching strategies to improve disk system performance", 1994; as a sort key, with
    no bound on the protected segment, like SGLang's.
    """

    def key(self, node: Node) -> tuple[bool, float]:
        """Whether it was reused, and the time of last use."""
        return node.num_uses > 0, node.last_used_s


class LeastFrequentlyUsed(EvictionPolicy):
    """The leaf with the fewest uses goes first, the least recently used of them before the others."""

    def key(self, node: Node) -> tuple[int, float]:
        """Number of uses, and the time of the last."""
        return node.num_uses, node.last_used_s


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
