"""The default eviction policy: it learns how long each kind of leaf is worth keeping, and keeps it that long."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from radixkv.eviction import EvictionPolicy, used_nodes
from radixkv.radix_tree import TOKEN_BYTES, Node

Weights = npt.NDArray[np.float64]

# Kinds by number of uses: 0, 1, 2 to 3, 4 to 7, more. More kinds, or other features, win nothing: docs/LOG.md.
_NUM_KINDS = 5
# Ages fall into half octaves from 2**-20 s to 2**22 s, seven weeks. Whole octaves cost 3 % of the hits.
_AGES_PER_OCTAVE = 2
_SHORTEST_LOG_AGE = -20
_NUM_AGES = 42 * _AGES_PER_OCTAVE
_AGES_S = np.exp2(_SHORTEST_LOG_AGE + np.arange(_NUM_AGES) / _AGES_PER_OCTAVE)  # [num_ages], upper edges
_MEAN_AGES_S = _AGES_S * (1 + 2 ** (-1 / _AGES_PER_OCTAVE)) / 2  # [num_ages]
_LIFETIMES_S = np.concatenate(([0.0], _AGES_S))  # [num_lifetimes = 1 + num_ages]
# Leases between two plans; a plan takes 0.5 ms. From 32 to 512 makes no difference on the conversation trace.
_LEASES_A_PLAN = 128
_KEPT_A_PLAN = 0.99  # what was learned halves within 8,800 leases
_LEAST_GAIN = 1.02  # below it, a plan is noise


class _Stay(NamedTuple):
    """What was true of a node when it was last used.

    Attributes:
        num_blocks: its blocks then; some may have been evicted since.
        end: offset and hash of its last whole block, once some were.
    """

    num_blocks: int
    end: tuple[int, int] | None = None


class _Ghost(NamedTuple):
    """What is remembered of an evicted leaf."""

    kind: int
    num_uses: int
    last_used_s: float
    stay: _Stay


class LearnedLifetimes(EvictionPolicy):
    """The leaf whose lifetime ended first goes first; lifetimes are learned from the traffic.

    Leaves are of a few kinds, by how often they were used. For each kind the policy counts after how many seconds
    blocks are used again, also those that it evicted too early: it remembers them. From the counts it plans a lifetime
    for each kind, so that all blocks together just fit and hits are the most:

        hits(kind, lifetime)   blocks used again within the lifetime
        room(kind, lifetime)   block seconds that it takes: until the use, or until the lifetime ends
        plan                   for each kind the lifetime with the greatest hits - price * room,
                               at the price for which all room together is num_blocks * seconds

    Between two plans on both sides of that price, a fixed share of the nodes has the longer lifetimes. So of a loop
    larger than the cache a part stays, rather than nothing. If all lifetimes are equal the order is that of last use,
    and that is the order as long as the plan promises no more hits than it does.

    Costs O(1) for a key, O(depth) for a lease, and half a millisecond for a plan once in 128 leases. Remembers as many
    evicted leaves as there are blocks.

    Source: the lifetimes are those of Beckmann, Chen, Cidon: "LHD: Improving cache hit rate by maximizing hit
    density", NSDI 2018, chosen ahead, so that they are a sort key; uses as kinds are those of Wang et al.: "KVCache
    cache in the wild", ATC 2025.

    Args:
        num_blocks: blocks of the cache's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._hits = np.zeros((_NUM_KINDS, _NUM_AGES))  # blocks used again, by age
        self._stays = np.zeros(_NUM_KINDS)  # blocks that began to wait for their next use
        self._seconds = 0.0
        self._last_lease_s: float | None = None
        self._num_leases = 0
        self._ghosts: OrderedDict[int, _Ghost] = OrderedDict()
        self._lifetimes_s = [(0.0, 0.0)] * _NUM_KINDS
        self._long_share = 0.0

    def key(self, node: Node) -> float:
        """When its lifetime ends, in seconds."""
        short_s, long_s = self._lifetimes_s[_kind(node.num_uses)]
        is_long = node.fingerprint < self._long_share * 2.0**64
        return node.last_used_s + (long_s if is_long else short_s)

    # -- what happens ----------------------------------------------------------------------------------------------

    def reused(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Learn from each node of the path that was found to its end. Complexity: O(depth)."""
        for used in used_nodes(node, num_bytes):
            self._use(used, used.last_used_s, now_s)
        self._tick(now_s)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Learn from the upper half; the lower one goes on waiting."""
        upper = lower.parent
        assert upper is not None
        stay: _Stay = lower.policy_note
        end = None
        if stay.end is not None and stay.end[0] >= len(upper.tokens):
            end = stay.end[0] - len(upper.tokens), stay.end[1]
        lower.policy_note = _Stay(max(stay.num_blocks - upper.num_blocks, lower.num_blocks), end)
        self._use(upper, last_used_s, now_s)

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Start waiting for its next use. If it was evicted before, learn what its lifetime should have been."""
        stay: _Stay | None = leaf.policy_note
        if stay is not None:  # it has grown
            self._stays[_kind(leaf.num_uses)] += max(0, leaf.num_blocks - stay.num_blocks)
            leaf.policy_note = _Stay(max(leaf.num_blocks, stay.num_blocks), stay.end)
            return
        ghost = self._ghosts.pop(leaf.fingerprint, None)
        if ghost is not None:
            is_whole = ghost.stay.end is not None and _holds(leaf, *ghost.stay.end)
            num_blocks = ghost.stay.num_blocks if is_whole else 1
            self._hits[ghost.kind, _age_index(now_s - ghost.last_used_s)] += num_blocks
            if 2 * num_blocks >= leaf.num_blocks:  # mostly the same tokens as before
                leaf.num_uses = ghost.num_uses + 1
        self._stay(leaf)

    def evicted(self, leaf: Node, num_blocks: int, now_s: float) -> None:
        """Remember what its last whole block was, and the leaf once all of it is gone."""
        stay: _Stay = leaf.policy_note
        if stay.end is None:
            leaf.policy_note = stay = _Stay(stay.num_blocks, _end(leaf))
        if num_blocks == leaf.num_blocks:
            self._ghosts[leaf.fingerprint] = _Ghost(_kind(leaf.num_uses), leaf.num_uses, leaf.last_used_s, stay)
            if len(self._ghosts) > self._num_blocks:
                self._ghosts.popitem(last=False)

    def _use(self, node: Node, last_used_s: float, now_s: float) -> None:
        stay: _Stay | None = node.policy_note
        num_blocks = node.num_blocks if stay is None else stay.num_blocks
        self._hits[_kind(node.num_uses), _age_index(now_s - last_used_s)] += num_blocks
        node.num_uses += 1
        self._stay(node)

    def _stay(self, node: Node) -> None:
        node.policy_note = _Stay(node.num_blocks)
        self._stays[_kind(node.num_uses)] += node.num_blocks

    def _tick(self, now_s: float) -> None:
        if self._last_lease_s is not None:
            self._seconds += now_s - self._last_lease_s
        self._last_lease_s = now_s
        self._num_leases += 1
        if self._num_leases % _LEASES_A_PLAN == 0:
            self._plan()
            self._hits *= _KEPT_A_PLAN
            self._stays *= _KEPT_A_PLAN
            self._seconds *= _KEPT_A_PLAN

    # -- the plan --------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Choose each kind's lifetimes, short and long, and the share of nodes that get the long one."""
        budget = self._num_blocks * self._seconds  # block seconds
        num_stays = np.maximum(self._stays, self._hits.sum(axis=1))  # [num_kinds]
        classes = _Lifetimes(_smoothed(self._hits, self._num_blocks), num_stays)
        alike = _Lifetimes(self._hits.sum(axis=0, keepdims=True), num_stays.sum(keepdims=True))
        short, long, share, hits = classes.plan(budget)
        if hits < _LEAST_GAIN * alike.plan(budget)[3]:
            self._lifetimes_s, self._long_share = [(0.0, 0.0)] * _NUM_KINDS, 0.0
            return
        self._lifetimes_s = [tuple(pair) for pair in _LIFETIMES_S[np.stack((short, long), axis=1)].tolist()]
        self._long_share = share


class _Lifetimes:
    """Hits and room of each kind at each lifetime.

    Args:
        hits: `[num_kinds, num_ages]`, blocks used again, by age.
        num_stays: `[num_kinds]`, blocks that waited, used again or not.
    """

    def __init__(self, hits: Weights, num_stays: Weights) -> None:
        zeros = np.zeros((len(hits), 1))
        self.hits = np.hstack((zeros, hits.cumsum(axis=1)))  # [num_kinds, num_lifetimes]
        waited = np.hstack((zeros, (hits * _MEAN_AGES_S).cumsum(axis=1)))
        self.room = waited + (num_stays[:, None] - self.hits) * _LIFETIMES_S  # [num_kinds, num_lifetimes]

    def plan(self, budget: float) -> tuple[Weights, Weights, float, float]:
        """Lifetimes that fit the budget, ones that do not, the share of the latter that fills it, and the hits."""
        low, high = -60.0, 60.0  # log2 of the price of a block second
        for _ in range(40):
            price = (low + high) / 2
            if self._at(price)[1] > budget:
                low = price
            else:
                high = price
        short, short_room, short_hits = self._at(high)
        long, long_room, long_hits = self._at(low)
        excess = long_room - short_room
        share = min(1.0, max(0.0, (budget - short_room) / excess)) if excess > 0 else 0.0
        return short, long, share, short_hits + share * (long_hits - short_hits)

    def _at(self, log_price: float) -> tuple[npt.NDArray[np.intp], float, float]:
        best = np.argmax(self.hits - 2.0**log_price * self.room, axis=1)  # [num_kinds]; the shortest of equals
        kinds = np.arange(len(best))
        return best, float(self.room[kinds, best].sum()), float(self.hits[kinds, best].sum())


def _smoothed(hits: Weights, weight: float) -> Weights:
    """Draw each kind's ages towards those of all, as if `weight` more blocks had been seen; its sum stays."""
    sums = hits.sum(axis=1, keepdims=True)  # [num_kinds, 1]
    ages = hits.sum(axis=0) / max(1.0, hits.sum())  # [num_ages]
    smoothed: Weights = sums * (hits + weight * ages) / (sums + weight)
    return smoothed


def _kind(num_uses: int) -> int:
    return min(num_uses.bit_length(), _NUM_KINDS - 1)


def _age_index(age_s: float) -> int:
    if age_s <= _AGES_S[0]:
        return 0
    return min(_NUM_AGES - 1, math.ceil((math.log2(age_s) - _SHORTEST_LOG_AGE) * _AGES_PER_OCTAVE))


def _end(leaf: Node) -> tuple[int, int] | None:
    """Where the last whole block of a leaf begins, and its hash; None if no block is whole."""
    block_bytes = leaf.tree.block_size * TOKEN_BYTES
    start = len(leaf.tokens) // block_bytes * block_bytes - block_bytes
    return None if start < 0 else (start, xxh3_64_intdigest(leaf.tokens[start : start + block_bytes]))


def _holds(leaf: Node, start: int, digest: int) -> bool:
    block = leaf.tokens[start : start + leaf.tree.block_size * TOKEN_BYTES]
    return xxh3_64_intdigest(block) == digest
