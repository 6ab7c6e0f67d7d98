"""The default eviction policy: it learns how long each kind of leaf is worth keeping, and keeps it that long."""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from radixkv.eviction import EvictionPolicy, used_nodes
from radixkv.node import Node
from radixkv.token_bytes import TOKEN_BYTES

Weights = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Nine kinds of nodes that were never used: below a parent with no, one, more uses, each by length. Four kinds of
# others, by uses: 1, 2 to 3, 4 to 7, more. What other kinds win or lose is in docs/LOG.md.
_LENGTHS_TOKENS = (1024, 8192)
_NUM_KINDS = 13
# Ages fall into half octaves from 2**-20 s to 2**22 s, seven weeks. Whole octaves cost 3 % of the hits.
_AGES_PER_OCTAVE = 2
_SHORTEST_LOG_AGE = -20
_NUM_AGES = 42 * _AGES_PER_OCTAVE
_AGES_S = np.exp2(_SHORTEST_LOG_AGE + np.arange(_NUM_AGES) / _AGES_PER_OCTAVE)  # [num_ages], upper edges
_LIFETIMES_S = np.concatenate(([0.0], _AGES_S))  # [num_lifetimes = 1 + num_ages]
# Uses and insertions between two plans; a plan takes 0.5 ms. A quarter or four times of it makes no difference.
_EVENTS_A_PLAN = 256
_KEPT_A_PLAN = 0.99  # what was learned halves within 18,000 events
_LEAST_GAIN = 1.02  # below it, a plan is noise
_LEAST_GHOSTS = 4096  # for a cache of a few blocks


class _Stay(NamedTuple):
    """What was true of a node when it was last used.

    Attributes:
        kind: what kind of node it was.
        num_blocks: its blocks then; some may have been evicted since.
        marks: index and hash of a few of its whole blocks, the last one first; taken once some are evicted.
    """

    kind: int
    num_blocks: int
    marks: tuple[tuple[int, int], ...] = ()


class _Ghost(NamedTuple):
    """What is remembered of an evicted leaf."""

    num_uses: int
    last_used_s: float
    stay: _Stay


class LearnedLifetimes(EvictionPolicy):
    """The leaf whose lifetime ended first goes first; lifetimes are learned from the traffic.

    Leaves are of a few kinds, by how often they were used, where they hang and how long they are. For each kind the
    policy counts after how many seconds blocks are used again, also those that it evicted too early: it remembers
    them. From the counts it plans a lifetime for each kind, so that all blocks together just fit and hits are the most:

        hits(kind, lifetime)   blocks used again within the lifetime
        room(kind, lifetime)   block seconds that it takes: until the use, or until the lifetime ends
        plan                   for each kind the lifetime with the greatest hits - price * room,
                               at the price for which all room together is num_blocks * seconds

    Between two plans on both sides of that price, a fixed share of the nodes has the longer lifetimes. So of a loop
    larger than the cache a part stays, rather than nothing. If all lifetimes are equal the order is that of last use,
    and that is the order as long as the plan promises no more hits than it does.

    Costs O(1) for a key, O(depth) for a lease, and half a millisecond for a plan once in 256 events. Remembers as many
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
        self._waits = np.zeros((_NUM_KINDS, _NUM_AGES))  # block seconds until then
        self._stays = np.zeros(_NUM_KINDS)  # blocks that began to wait for their next use
        self._seconds = 0.0
        self._last_event_s: float | None = None
        self._num_events = 0
        self._ghosts: OrderedDict[int, _Ghost] = OrderedDict()
        self._lifetimes_s = [(0.0, 0.0)] * _NUM_KINDS
        self._long_share = 0.0

    def key(self, node: Node) -> float:
        """When its lifetime ends, in seconds."""
        stay: _Stay = node.policy_note
        short_s, long_s = self._lifetimes_s[stay.kind]
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
        marks = tuple((index - upper.num_blocks, digest) for index, digest in stay.marks if index >= upper.num_blocks)
        num_blocks = max(stay.num_blocks - upper.num_blocks, lower.num_blocks)
        upper.policy_note = _Stay(stay.kind, upper.num_blocks)
        self._use(upper, last_used_s, now_s)
        lower.policy_note = _Stay(_kind(lower), num_blocks, marks)
        self._stays[stay.kind] -= num_blocks
        self._stays[lower.policy_note.kind] += num_blocks

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Start waiting for its next use. If it was evicted before, learn what its lifetime should have been."""
        stay: _Stay | None = leaf.policy_note
        if stay is not None:  # it has grown
            self._stays[stay.kind] += max(0, leaf.num_blocks - stay.num_blocks)
            leaf.policy_note = _Stay(stay.kind, max(leaf.num_blocks, stay.num_blocks), stay.marks)
            return
        ghost = self._ghosts.pop(leaf.fingerprint, None)
        if ghost is not None:
            num_blocks = _num_equal_blocks(leaf, ghost.stay)
            self._hit(ghost.stay.kind, num_blocks, now_s - ghost.last_used_s)
            if 2 * num_blocks >= leaf.num_blocks:  # mostly the same tokens as before
                leaf.num_uses = ghost.num_uses + 1
        self._stay(leaf)
        self._tick(now_s)

    def evicted(self, leaf: Node, num_blocks: int, now_s: float) -> None:
        """Mark what it was, and remember it once all of it is gone."""
        stay: _Stay = leaf.policy_note
        if not stay.marks:
            leaf.policy_note = stay = _Stay(stay.kind, stay.num_blocks, _marks(leaf))
        if num_blocks == leaf.num_blocks:
            self._ghosts[leaf.fingerprint] = _Ghost(leaf.num_uses, leaf.last_used_s, stay)
            if len(self._ghosts) > max(_LEAST_GHOSTS, self._num_blocks):
                self._ghosts.popitem(last=False)

    def _use(self, node: Node, last_used_s: float, now_s: float) -> None:
        stay: _Stay = node.policy_note
        self._hit(stay.kind, stay.num_blocks, now_s - last_used_s)
        node.num_uses += 1
        self._stay(node)

    def _hit(self, kind: int, num_blocks: int, age_s: float) -> None:
        index = _age_index(age_s)
        self._hits[kind, index] += num_blocks
        self._waits[kind, index] += num_blocks * age_s

    def _stay(self, node: Node) -> None:
        node.policy_note = _Stay(_kind(node), node.num_blocks)
        self._stays[node.policy_note.kind] += node.num_blocks

    def _tick(self, now_s: float) -> None:
        if self._last_event_s is not None:
            self._seconds += now_s - self._last_event_s
        self._last_event_s = now_s
        self._num_events += 1
        if self._num_events < _EVENTS_A_PLAN:
            if self._num_events.bit_count() == 1:  # the first plans need not wait
                self._plan()
        elif self._num_events % _EVENTS_A_PLAN == 0:
            self._plan()
            self._hits *= _KEPT_A_PLAN
            self._waits *= _KEPT_A_PLAN
            self._stays *= _KEPT_A_PLAN
            self._seconds *= _KEPT_A_PLAN

    # -- the plan --------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Choose each kind's lifetimes, short and long, and the share of nodes that get the long one."""
        budget = self._num_blocks * self._seconds  # block seconds
        num_stays = np.maximum(self._stays, self._hits.sum(axis=1))  # [num_kinds]
        mean_ages_s = self._waits.sum(axis=0) / np.maximum(1e-9, self._hits.sum(axis=0))  # [num_ages]
        classes = _Lifetimes(_smoothed(self._hits, self._num_blocks), num_stays, mean_ages_s)
        alike = _Lifetimes(self._hits.sum(axis=0, keepdims=True), num_stays.sum(keepdims=True), mean_ages_s)
        short, long, share, hits = classes.plan(budget)
        if hits < _LEAST_GAIN * alike.hits_of_last_use(budget):
            self._lifetimes_s, self._long_share = [(0.0, 0.0)] * _NUM_KINDS, 0.0
            return
        self._lifetimes_s = [tuple(pair) for pair in _LIFETIMES_S[np.stack((short, long), axis=1)].tolist()]
        self._long_share = share


class _Lifetimes:
    """Hits and room of each kind at each lifetime.

    Args:
        hits: `[num_kinds, num_ages]`, blocks used again, by age.
        num_stays: `[num_kinds]`, blocks that waited, used again or not.
        mean_ages_s: `[num_ages]`, how long those used again had waited.
    """

    def __init__(self, hits: Weights, num_stays: Weights, mean_ages_s: Weights) -> None:
        zeros = np.zeros((len(hits), 1))
        self.hits = np.hstack((zeros, hits.cumsum(axis=1)))  # [num_kinds, num_lifetimes]
        waited = np.hstack((zeros, (hits * mean_ages_s).cumsum(axis=1)))
        self.room = waited + (num_stays[:, None] - self.hits) * _LIFETIMES_S  # [num_kinds, num_lifetimes]

    def plan(self, budget: float) -> tuple[Indices, Indices, float, float]:
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

    def hits_of_last_use(self, budget: float) -> float:
        """Hits if all blocks have one lifetime, the longest that fits."""
        room, hits = self.room.sum(axis=0), self.hits.sum(axis=0)  # [num_lifetimes], both growing
        return float(hits[max(0, int(np.searchsorted(room, budget, side="right")) - 1)])

    def _at(self, log_price: float) -> tuple[Indices, float, float]:
        best = np.argmax(self.hits - 2.0**log_price * self.room, axis=1)  # [num_kinds]; the shortest of equals
        kinds = np.arange(len(best))
        return best, float(self.room[kinds, best].sum()), float(self.hits[kinds, best].sum())


def _smoothed(hits: Weights, weight: float) -> Weights:
    """Draw each kind's ages towards those of all, as if `weight` more blocks had been seen; its sum stays."""
    sums = hits.sum(axis=1, keepdims=True)  # [num_kinds, 1]
    ages = hits.sum(axis=0) / max(1.0, hits.sum())  # [num_ages]
    smoothed: Weights = sums * (hits + weight * ages) / (sums + weight)
    return smoothed


def _kind(node: Node) -> int:
    if node.num_uses:
        return min(8 + node.num_uses.bit_length(), _NUM_KINDS - 1)
    assert node.parent is not None
    return 3 * min(node.parent.num_uses, 2) + bisect.bisect_right(_LENGTHS_TOKENS, len(node.tokens) // TOKEN_BYTES)


def _age_index(age_s: float) -> int:
    if age_s <= _AGES_S[0]:
        return 0
    return min(_NUM_AGES - 1, math.ceil((math.log2(age_s) - _SHORTEST_LOG_AGE) * _AGES_PER_OCTAVE))


def _marks(leaf: Node) -> tuple[tuple[int, int], ...]:
    """Index and hash of a leaf's last whole block, and of those at three, two and one quarters of it."""
    num_whole_blocks = len(leaf.tokens) // (leaf.tree.block_size * TOKEN_BYTES)
    indices = sorted({num_whole_blocks * quarters // 4 - 1 for quarters in (4, 3, 2, 1)}, reverse=True)
    return tuple((index, _block_digest(leaf, index)) for index in indices if index >= 0)


def _num_equal_blocks(leaf: Node, stay: _Stay) -> int:
    """How many blocks of a leaf are those that were evicted. The first one is."""
    for place, (index, digest) in enumerate(stay.marks):
        if _block_digest(leaf, index) == digest:
            return stay.num_blocks if place == 0 else index + 1
    return 1


def _block_digest(leaf: Node, index: int) -> int:
    block_bytes = leaf.tree.block_size * TOKEN_BYTES
    return xxh3_64_intdigest(leaf.tokens[index * block_bytes : (index + 1) * block_bytes])
