"""The classic eviction policies: LRU, segmented LRU, LFU."""

from __future__ import annotations

from radixkv.cache.node import Node
from radixkv.cache.policies.policy import EvictionPolicy


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
