"""A trial of eviction orders: shadow caches tell which of them has had the most hits lately."""

from __future__ import annotations

import itertools
import math
import operator
from enum import IntEnum

from radixkv.cache.policies.shadow_cache import BlockSampler, Sample, ShadowCache
from radixkv.cache.tree.node import Node

# One turn is as many inserted blocks as the cache has. A change of order gives all leaves new keys, so it waits for a
# tenth of a turn; lifetimes are given four turns to be learned. Another order must lead by twice the noise. docs/LOG.md
# says what other values do.
_TURNS_A_VERDICT = 0.1
_TURNS_TO_LEARN = 4.0
_TURNS_TO_HALVE = 2.0
_LEAST_DEVIATIONS = 2.0
FOREVER_S = 2.0**30


class Order(IntEnum):
    """The orders that leaves may be evicted in."""

    LAST_USE = 0
    REUSED_LAST = 1
    LIFETIMES = 2


class OrderTrial:
    """Follows a sample of the blocks in one shadow cache for each order, and picks the order with the most hits.

    Two orders are compared on the blocks that one of them held and the other did not. The order in force gives way to
    one that leads by more than chance would explain.

    Args:
        num_blocks: blocks of the cache's pool.

    Attributes:
        order: the order in force.
    """

    def __init__(self, num_blocks: int) -> None:
        self.order = Order.LIFETIMES  # the same as last use until lifetimes are learned
        self._num_blocks = num_blocks
        self._sampler = BlockSampler(num_blocks)
        self._shadows = [ShadowCache() for _ in Order]
        self._wins = [[0.0] * len(Order) for _ in Order]  # sampled blocks that one held lately and the other did not
        self._num_new_blocks = 0  # since the last verdict
        self._num_turns = 0.0

    def sample(self, node: Node, start: int) -> tuple[Sample, ...]:
        """Return the blocks of a node from block `start` on that are followed. Complexity: O(tokens of the path)."""
        return self._sampler.sample(node, start)

    def use(self, block_size: int, samples: tuple[Sample, ...], now_s: float, end_s: float) -> None:
        """Show sampled blocks of one node to each shadow cache, the deepest first, as it has to go before the others.

        Args:
            block_size: tokens a block.
            samples: the blocks.
            now_s: time of this use.
            end_s: when their learned lifetime ends.

        Complexity: O(log sampled blocks) for each block.
        """
        if not samples:
            return
        capacity = self._sampler.capacity(block_size)
        digests = [digest for _, digest in reversed(samples)]
        keys = ((now_s, now_s), (now_s, now_s + FOREVER_S), (end_s, end_s))  # by order: of new blocks, of held ones
        held = [shadow.use(digests, *pair, capacity) for shadow, pair in zip(self._shadows, keys, strict=True)]
        if not held[0] == held[1] == held[2]:
            for winner, loser in itertools.permutations(Order, 2):
                self._wins[winner][loser] += sum(map(operator.gt, held[winner], held[loser]))

    def filled(self, num_blocks: int) -> bool:
        """Note that `num_blocks` more blocks were inserted, and pick the order anew if enough were since the last time.

        Returns:
            Whether the order has changed.
        """
        self._num_new_blocks += num_blocks
        turns = self._num_new_blocks / self._num_blocks
        if turns < _TURNS_A_VERDICT:
            return False
        self._num_new_blocks = 0
        self._num_turns += turns
        kept = 0.5 ** (turns / _TURNS_TO_HALVE)
        self._wins = [[wins * kept for wins in row] for row in self._wins]
        best = max(Order, key=self._lead)
        noise = math.sqrt(self._wins[best][self.order] + self._wins[self.order][best])
        if self._num_turns <= _TURNS_TO_LEARN or self._lead(best) <= _LEAST_DEVIATIONS * noise:
            return False
        self.order = best
        return True

    def _lead(self, order: Order) -> float:
        """Return how many more sampled blocks an order held lately than the one in force."""
        return self._wins[order][self.order] - self._wins[self.order][order]
