"""The default eviction policy: simulates three orders on a sample of the blocks, and uses the best one."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
from collections import OrderedDict
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from radixkv.api.miss_reason import MissReason
from radixkv.cache.eviction_policy import EvictionPolicy, used_nodes
from radixkv.cache.node import Node
from radixkv.tokens import TOKEN_BYTES

Weights = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Buckets of ages are half octaves from 2**-20 s to 2**22 s (seven weeks). Whole octaves lose 3 % of the hits.
_AGES_PER_OCTAVE = 2
_SHORTEST_LOG_AGE = -20
_NUM_AGES = 42 * _AGES_PER_OCTAVE
_AGES_S = np.exp2(_SHORTEST_LOG_AGE + np.arange(_NUM_AGES) / _AGES_PER_OCTAVE)  # [num_ages], upper edges
_LIFETIMES_S = np.concatenate(([0.0], _AGES_S))  # [num_lifetimes = 1 + num_ages]
_MIN_UNUSED_SHARE = 1e-3  # assumed share of blocks that are never reused, so that no lifetime is longer than necessary


class ReuseCounts:
    """Statistics of how many seconds it took until blocks of each kind were used again.

    Args:
        num_kinds: kinds of leaves.
    """

    def __init__(self, num_kinds: int) -> None:
        self.hits = np.zeros((num_kinds, _NUM_AGES))  # blocks used again, by age
        self.waits = np.zeros((num_kinds, _NUM_AGES))  # block seconds until the reuse, by age
        self.stays = np.zeros(num_kinds)  # blocks that started to wait for their next use
        self.seconds = 0.0

    def hit(self, kind: int, num_blocks: int, age_s: float) -> None:
        """Record that blocks were used again, at this age. Complexity: O(1)."""
        index = _age_index(age_s)
        self.hits[kind, index] += num_blocks
        self.waits[kind, index] += num_blocks * age_s

    def forget(self, kept: float) -> None:
        """Multiply all counts by `kept`, a number below 1."""
        self.hits *= kept
        self.waits *= kept
        self.stays *= kept
        self.seconds *= kept

    def plan(self, num_blocks: int) -> tuple[list[tuple[float, float]], float]:
        """Choose the lifetimes that give the most hits while all blocks just fit into the pool.

        Args:
            num_blocks: blocks of the cache's pool.

        Returns:
            A short and a long lifetime in seconds for each kind, and the share of nodes that get the long one.

        Complexity: constant; it takes half a millisecond.
        """
        used = self.hits.sum(axis=1)  # [num_kinds]
        num_stays = np.maximum(self.stays, (1 + _MIN_UNUSED_SHARE) * used)
        mean_ages_s = self.waits.sum(axis=0) / np.maximum(1e-9, self.hits.sum(axis=0))  # [num_ages]
        lifetimes = _Lifetimes(_smoothed(self.hits, num_blocks), num_stays, mean_ages_s)
        short, long, share = lifetimes.plan(num_blocks * self.seconds)
        return [
            (float(_LIFETIMES_S[low]), float(_LIFETIMES_S[high])) for low, high in zip(short, long, strict=True)
        ], share


class _Lifetimes:
    """The hits and the occupied block seconds (room) of each kind at each lifetime.

    Args:
        hits: `[num_kinds, num_ages]`, blocks used again, by age.
        num_stays: `[num_kinds]`, blocks that waited, whether they were used again or not.
        mean_ages_s: `[num_ages]`, mean wait of the blocks that were used again.
    """

    def __init__(self, hits: Weights, num_stays: Weights, mean_ages_s: Weights) -> None:
        zeros = np.zeros((len(hits), 1))
        self.hits = np.hstack((zeros, hits.cumsum(axis=1)))  # [num_kinds, num_lifetimes]
        waited = np.hstack((zeros, (hits * mean_ages_s).cumsum(axis=1)))
        self.room = waited + (num_stays[:, None] - self.hits) * _LIFETIMES_S  # [num_kinds, num_lifetimes]

    def plan(self, budget: float) -> tuple[Indices, Indices, float]:
        """Return lifetimes within the budget, longer ones that exceed it, and the share of nodes for the latter."""
        low, high = -60.0, 60.0  # log2 of the price of a block second
        for _ in range(40):
            price = (low + high) / 2
            if self._at(price)[1] > budget:
                low = price
            else:
                high = price
        short, short_room = self._at(high)
        long, long_room = self._at(low)
        excess = long_room - short_room
        share = min(1.0, max(0.0, (budget - short_room) / excess)) if excess > 0 else 0.0
        return short, long, share

    def _at(self, log_price: float) -> tuple[Indices, float]:
        best = np.argmax(self.hits - 2.0**log_price * self.room, axis=1)  # [num_kinds]; the shortest of equals
        return best, float(self.room[np.arange(len(best)), best].sum())


def _smoothed(hits: Weights, weight: float) -> Weights:
    """Blend each kind's distribution of ages with that of all kinds, weighted as `weight` blocks. Keeps the sums."""
    sums = hits.sum(axis=1, keepdims=True)  # [num_kinds, 1]
    ages = hits.sum(axis=0) / max(1.0, hits.sum())  # [num_ages]
    smoothed: Weights = sums * (hits + weight * ages) / (sums + weight)
    return smoothed


def _age_index(age_s: float) -> int:
    if age_s <= _AGES_S[0]:
        return 0
    return min(_NUM_AGES - 1, math.ceil((math.log2(age_s) - _SHORTEST_LOG_AGE) * _AGES_PER_OCTAVE))


_SAMPLED_TOKENS = 512  # at most one block per this many tokens is sampled, so short blocks cost no more than long ones
_NUM_SAMPLED = 1024  # blocks in a shadow cache; with 8192 the hits on the trace are the same within noise


class Sample(NamedTuple):
    """A block of a node that the shadow caches follow.

    Attributes:
        block_index: index of the block in the node.
        digest: hash of the namespace and all tokens up to the block's end.
    """

    block_index: int
    digest: int


class BlockSampler:
    """Samples blocks by the hash of their prefix, independent of where nodes begin and end.

    Source: Waldspurger et al.: "Efficient MRC construction with SHARDS", FAST 2015.

    Args:
        num_blocks: blocks of the cache's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def capacity(self, block_size: int) -> int:
        """Return how many sampled blocks represent the whole cache."""
        return max(1, min(_NUM_SAMPLED, self._num_blocks // _stride(block_size)))

    def sample(self, node: Node, start: int) -> tuple[Sample, ...]:
        """List the sampled blocks of a node from block `start` on.

        Complexity: O(tokens of the path), one hash over them.
        """
        block_bytes = node.owner.block_size * TOKEN_BYTES
        stride = _stride(node.owner.block_size)
        limit = 2.0**64 * _NUM_SAMPLED * stride / self._num_blocks
        above = _ancestors(node)
        digest = xxh3_64(seed=(above[0] if above else node).fingerprint)
        for ancestor in above:
            digest.update(ancestor.tokens)
        samples = []
        hashed_bytes = 0
        first = (
            -(1 + sum(ancestor.num_blocks for ancestor in above)) % stride
        )  # the first block that ends a stride of the path
        for index in range(first, len(node.tokens) // block_bytes, stride):
            end = (index + 1) * block_bytes
            digest.update(node.tokens[hashed_bytes:end])
            hashed_bytes = end
            if index >= start and digest.intdigest() < limit:
                samples.append(Sample(index, digest.intdigest()))
        return tuple(samples)


class ShadowCache:
    """The digests of the sampled blocks that a cache would contain if it evicted the smallest key first."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, int, int]] = {}  # by digest: key, use and digest
        self._heap: list[tuple[float, int, int]] = []  # the entries, including outdated ones
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: int) -> bool:
        return digest in self._entries

    def use(self, digests: list[int], new_key: float, held_key: float, capacity: int) -> list[bool]:
        """Add blocks, and evict those with the smallest keys until no more than `capacity` are left.

        Args:
            digests: the blocks, in the order of their use.
            new_key: the key of a block that is not in the cache yet.
            held_key: the key of a block that already is.
            capacity: the number of blocks that fit.

        Returns:
            For each block, whether it was in the cache already.

        Complexity: O(log capacity) per block, amortized.
        """
        entries, heap, num_uses = self._entries, self._heap, self._num_uses
        held = []
        for digest in digests:
            is_held = digest in entries
            held.append(is_held)
            num_uses += 1
            entry = entries[digest] = (held_key if is_held else new_key, num_uses, digest)
            heapq.heappush(heap, entry)
            while len(entries) > capacity:
                first = heapq.heappop(heap)
                if entries.get(first[2]) is first:
                    del entries[first[2]]
        self._num_uses = num_uses
        if len(heap) > 4 * capacity + len(digests):
            self._heap = list(entries.values())
            heapq.heapify(self._heap)
        return held


def _stride(block_size: int) -> int:
    return math.ceil(_SAMPLED_TOKENS / block_size)


def _ancestors(node: Node) -> list[Node]:
    """List the nodes above, without the root, the topmost first."""
    above: list[Node] = []
    ancestor = node.parent
    while ancestor is not None and ancestor.parent is not None:
        above.append(ancestor)
        ancestor = ancestor.parent
    return above[::-1]


# One turn is the insertion of as many blocks as the cache has. The orders are compared only every tenth of a turn,
# because a change gives all leaves new keys. Lifetimes are learned for four turns before the first comparison counts. A
# new order must lead by twice the standard deviation. docs/LOG.md compares other values.
_TURNS_PER_COMPARISON = 0.1
_TURNS_TO_LEARN = 4.0
_TURNS_TO_HALVE = 2.0
_MIN_DEVIATIONS = 2.0
FOREVER_S = 2.0**30


class LeafOrder(IntEnum):
    """The orders in which leaves can be evicted."""

    LAST_USE = 0
    REUSED_LAST = 1
    LIFETIMES = 2


class OrderTrial:
    """Simulates each order with a sample of the blocks in a shadow cache, and selects the order with the most hits.

    Two orders are compared by the uses that only one of them would have hit. The current order is replaced by one whose
    lead is larger than chance explains.

    Args:
        num_blocks: blocks of the cache's pool.

    Attributes:
        order: the current order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.order = LeafOrder.LIFETIMES  # equal to LRU until lifetimes are learned
        self._num_blocks = num_blocks
        self._sampler = BlockSampler(num_blocks)
        self._shadows = [ShadowCache() for _ in LeafOrder]
        self._wins = [
            [0.0] * len(LeafOrder) for _ in LeafOrder
        ]  # decayed counts of uses that only the first of two orders would have hit
        self._num_new_blocks = 0  # since the last comparison
        self._num_turns = 0.0

    def sample(self, node: Node, start: int) -> tuple[Sample, ...]:
        """Return the sampled blocks of a node from block `start` on. Complexity: O(tokens of the path)."""
        return self._sampler.sample(node, start)

    def use(self, block_size: int, samples: tuple[Sample, ...], now_s: float, end_s: float) -> None:
        """Record a use of sampled blocks of a node in each shadow cache, the deepest first, since it is evicted first.

        Args:
            block_size: tokens per block.
            samples: the blocks.
            now_s: time of this use.
            end_s: end of their learned lifetime.

        Complexity: O(log sampled blocks) for each block.
        """
        if not samples:
            return
        capacity = self._sampler.capacity(block_size)
        digests = [digest for _, digest in reversed(samples)]
        # For each order: the key of a block that is new in the shadow cache, and the key of one that was there.
        keys = ((now_s, now_s), (now_s, now_s + FOREVER_S), (end_s, end_s))
        held = [shadow.use(digests, *pair, capacity) for shadow, pair in zip(self._shadows, keys, strict=True)]
        if not held[0] == held[1] == held[2]:
            for winner, loser in itertools.permutations(LeafOrder, 2):
                self._wins[winner][loser] += sum(map(operator.gt, held[winner], held[loser]))

    def count_inserted(self, num_blocks: int) -> bool:
        """Record the insertion of `num_blocks` blocks, and select the order again after enough of them.

        Returns:
            Whether the order has changed.
        """
        self._num_new_blocks += num_blocks
        turns = self._num_new_blocks / self._num_blocks
        if turns < _TURNS_PER_COMPARISON:
            return False
        self._num_new_blocks = 0
        self._num_turns += turns
        kept = 0.5 ** (turns / _TURNS_TO_HALVE)
        self._wins = [[wins * kept for wins in row] for row in self._wins]
        best = max(LeafOrder, key=self._lead)
        noise = math.sqrt(self._wins[best][self.order] + self._wins[self.order][best])
        if self._num_turns <= _TURNS_TO_LEARN or self._lead(best) <= _MIN_DEVIATIONS * noise:
            return False
        self.order = best
        return True

    def _lead(self, order: LeafOrder) -> float:
        """Return how many more hits on recently sampled blocks an order had than the current order."""
        return self._wins[order][self.order] - self._wins[self.order][order]


# Nine kinds of nodes that were never reused: below a parent with no, one, or more uses, each in three lengths. Four
# kinds of other nodes, by uses: 1, 2 to 3, 4 to 7, more. docs/LOG.md compares other kinds.
_LENGTHS_TOKENS = (1024, 8192)
_NUM_KINDS = 13
# Uses and insertions between two plans; a plan takes 0.5 ms. A quarter or four times as many make no difference on the
# conversation trace. In a small cache blocks are reused sooner, so there a plan is made after half as many as the cache
# has blocks.
_EVENTS_PER_PLAN = 256
_MIN_EVENTS_PER_PLAN = 16
_KEPT_PER_EVENT = 0.99 ** (1 / 256)  # counts are halved within 18,000 events
_MIN_GHOSTS = 4096  # for a cache of a few blocks


class _Stay(NamedTuple):
    """A node that waits for its next use, in its state at its last use.

    Attributes:
        kind: the kind of node, 0 to 12.
        num_blocks: its blocks at that time; some may have been evicted since.
        num_uses: its uses, including those before an eviction.
        samples: its blocks that the shadow caches follow.
        marks: index and hash of a few of its whole blocks, the last block first; recorded when blocks are evicted.
        ghost: the record of its eviction, if it was evicted and published again, perhaps in several chunks.
        num_returned_blocks: blocks that have been published again since the eviction.
    """

    kind: int
    num_blocks: int
    num_uses: int = 0
    samples: tuple[Sample, ...] = ()
    marks: tuple[tuple[int, int], ...] = ()
    ghost: _Ghost | None = None
    num_returned_blocks: int = 0


class _Ghost(NamedTuple):
    """Record of an evicted leaf."""

    last_used_s: float
    stay: _Stay


class AdaptivePolicy(EvictionPolicy):
    """Evicts leaves in the one of three orders that had the most hits recently; see `OrderTrial`.

    The orders are least recently used; never reused, then least recently used; and learned lifetimes. So this policy is
    never much worse than the first two, and learned lifetimes are only used while they have more hits.

    Learned lifetimes: a leaf is of one of 13 kinds, by its uses, its parent's uses and its length. For each kind the
    policy records after how many seconds blocks are used again, including those that were evicted too early. From these
    statistics it plans a lifetime for each kind, so that all blocks just fit and have the most hits:

        hits(kind, lifetime)   blocks used again within the lifetime
        room(kind, lifetime)   block seconds until the reuse, or until the lifetime ends
        plan                   for each kind the lifetime with the greatest hits - price * room,
                               at the price for which all room together is num_blocks * seconds

    Usually no price uses exactly all blocks. The policy therefore makes a plan on either side of that price, and a
    fixed share of the nodes follows the plan with longer lifetimes. So if prompts recur in a loop that is larger than
    the cache, a part of the loop stays cached. If all lifetimes are equal, the order is that of last use.

    Memory: a record per evicted leaf, at most one per block of the cache, and a thousand sampled blocks per order.

    Complexity: O(1) for a key; O(depth) for a use; O(tokens of the path) for an insertion; half a millisecond for a
    plan, which is made after every 256 uses and insertions. The order changes at most once while a tenth of the cache
    is filled.

    Source: choosing between orders on samples: Qureshi et al.: "Adaptive insertion policies for high performance
    caching" (set dueling), ISCA 2007, with samples as in SHARDS and McNemar's test. Lifetimes: Beckmann, Chen, Cidon:
    "LHD: Improving cache hit rate by maximizing hit density", NSDI 2018; here lifetimes are chosen in advance, so that
    they are a sort key. Kinds by number of uses: Wang et al.: "KVCache cache in the wild", ATC 2025.

    Args:
        num_blocks: blocks of the cache's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._counts = ReuseCounts(_NUM_KINDS)
        self._lifetimes_s = [(0.0, 0.0)] * _NUM_KINDS  # short and long
        self._long_share = 0.0
        self._events_per_plan = min(_EVENTS_PER_PLAN, max(_MIN_EVENTS_PER_PLAN, num_blocks // 2))
        self._num_events = 0
        self._last_event_s: float | None = None
        self._ghosts: OrderedDict[int, _Ghost] = OrderedDict()
        self._trial = OrderTrial(num_blocks)

    def key(self, node: Node) -> float:
        """Return the key of a node in the current order: the time at which its lifetime ends."""
        if self._trial.order == LeafOrder.LIFETIMES:
            return node.last_used_s + self._learned_lifetime_s(node)
        is_kept = self._trial.order == LeafOrder.REUSED_LAST and node.num_uses > 0
        return node.last_used_s + (FOREVER_S if is_kept else 0.0)

    def _learned_lifetime_s(self, node: Node) -> float:
        stay: _Stay = node.policy_note
        short_s, long_s = self._lifetimes_s[stay.kind]
        return long_s if node.fingerprint < self._long_share * 2.0**64 else short_s

    def are_alike(self, upper: Node, lower: Node) -> bool:
        """Return whether both nodes are of the same kind."""
        above: _Stay = upper.policy_note
        below: _Stay = lower.policy_note
        return above.kind == below.kind

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Record a use of the nodes of the path that were matched completely; see `used_nodes`."""
        for used in used_nodes(node, num_bytes):
            self._use(used, used.last_used_s, now_s)
        self._tick(now_s)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Record a use of the upper half. The lower half still waits for its next use."""
        self.cut(lower)
        upper, stay = lower.parent, lower.policy_note
        assert upper is not None
        self._use(upper, last_used_s, now_s)
        lower.policy_note = stay._replace(kind=_kind(lower, stay.num_uses))
        self._counts.stays[stay.kind] -= stay.num_blocks
        self._counts.stays[lower.policy_note.kind] += stay.num_blocks

    def cut(self, lower: Node) -> None:
        """Divide the policy's note between both halves."""
        upper = lower.parent
        assert upper is not None
        cut = upper.num_blocks
        stay: _Stay = lower.policy_note
        upper.policy_note = _Stay(
            stay.kind, cut, stay.num_uses, tuple(each for each in stay.samples if each.block_index < cut)
        )
        lower.policy_note = _Stay(
            stay.kind,
            max(stay.num_blocks - cut, lower.num_blocks),
            stay.num_uses,
            tuple(Sample(index - cut, digest) for index, digest in stay.samples if index >= cut),
            tuple((index - cut, digest) for index, digest in stay.marks if index >= cut),
        )

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Join the policy's notes of the nodes."""
        stay: _Stay = lower.policy_note
        samples: list[Sample] = []
        num_blocks = 0
        for upper in uppers:
            samples += (Sample(index + num_blocks, digest) for index, digest in upper.policy_note.samples)
            num_blocks += upper.num_blocks
        samples += (Sample(index + num_blocks, digest) for index, digest in stay.samples)
        marks = tuple((index + num_blocks, digest) for index, digest in stay.marks)
        lower.policy_note = stay._replace(
            num_blocks=stay.num_blocks + num_blocks, samples=tuple(samples), marks=marks, ghost=None
        )

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Start to wait for the next use of a leaf. If it was evicted before, record the age of this use."""
        num_uses = num_blocks = 0
        ghost = self._ghosts.pop(leaf.fingerprint, None)
        if ghost is not None:
            num_blocks = _num_equal_blocks(leaf, ghost.stay)
            self._counts.hit(ghost.stay.kind, num_blocks, now_s - ghost.last_used_s)
            if 2 * num_blocks >= leaf.num_blocks:  # mostly the same tokens as before
                num_uses = ghost.stay.num_uses + 1
        self._wait(leaf, num_uses, self._trial.sample(leaf, 0))
        stay: _Stay = leaf.policy_note
        leaf.policy_note = stay._replace(ghost=ghost, num_returned_blocks=num_blocks)
        self._simulate_use(leaf, stay.samples, now_s)
        self._tick(now_s)
        self._count_inserted(leaf.num_blocks)

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Start to wait for the next use of the new blocks. If they were evicted before, record the age of this use."""
        stay: _Stay = leaf.policy_note
        num_new_blocks = max(0, leaf.num_blocks - stay.num_blocks)  # the others had been evicted and are cached again
        samples = self._trial.sample(leaf, stay.samples[-1].block_index + 1 if stay.samples else 0)
        stay = stay._replace(num_blocks=stay.num_blocks + num_new_blocks, samples=stay.samples + samples)
        if stay.ghost is not None:
            num_blocks = max(stay.num_returned_blocks, _num_equal_blocks(leaf, stay.ghost.stay))
            num_more_blocks = num_blocks - stay.num_returned_blocks
            self._counts.hit(stay.ghost.stay.kind, num_more_blocks, now_s - stay.ghost.last_used_s)
            stay = stay._replace(num_returned_blocks=num_blocks)
        leaf.policy_note = stay
        self._counts.stays[stay.kind] += num_new_blocks
        self._simulate_use(leaf, samples, now_s)
        self._count_inserted(num_new_blocks)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Record hashes of some blocks, and remember the leaf when all of it is evicted."""
        stay: _Stay = leaf.policy_note._replace(ghost=None)
        if not stay.marks:
            leaf.policy_note = stay = stay._replace(marks=_marks(leaf))
        if num_blocks == leaf.num_blocks:
            self._ghosts[leaf.fingerprint] = _Ghost(leaf.last_used_s, stay)
            if len(self._ghosts) > max(_MIN_GHOSTS, self._num_blocks):
                self._ghosts.popitem(last=False)

    def _use(self, node: Node, last_used_s: float, now_s: float) -> None:
        stay: _Stay = node.policy_note
        self._counts.hit(stay.kind, stay.num_blocks, now_s - last_used_s)
        node.num_uses += 1
        self._wait(node, stay.num_uses + 1, stay.samples)
        self._simulate_use(node, stay.samples, now_s)

    def _wait(self, node: Node, num_uses: int, samples: tuple[Sample, ...]) -> None:
        stay = node.policy_note = _Stay(_kind(node, num_uses), node.num_blocks, num_uses, samples)
        self._counts.stays[stay.kind] += stay.num_blocks

    def _tick(self, now_s: float) -> None:
        if self._last_event_s is not None:
            self._counts.seconds += now_s - self._last_event_s
        self._last_event_s = now_s
        self._num_events += 1
        is_due = self._num_events % self._events_per_plan == 0
        is_early = self._num_events < self._events_per_plan and self._num_events.bit_count() == 1  # 1, 2, 4, 8 ...
        if is_due or is_early:
            self._lifetimes_s, self._long_share = self._counts.plan(self._num_blocks)
        if is_due:
            self._counts.forget(_KEPT_PER_EVENT**self._events_per_plan)

    def _simulate_use(self, node: Node, samples: tuple[Sample, ...], now_s: float) -> None:
        self._trial.use(node.owner.block_size, samples, now_s, now_s + self._learned_lifetime_s(node))

    def _count_inserted(self, num_blocks: int) -> None:
        if self._trial.count_inserted(num_blocks):
            self.generation += 1


def _kind(node: Node, num_uses: int) -> int:
    if num_uses:
        return min(8 + num_uses.bit_length(), _NUM_KINDS - 1)
    assert node.parent is not None
    above: _Stay | None = node.parent.policy_note  # a root has none
    num_uses_above = 0 if above is None else min(above.num_uses, 2)
    return 3 * num_uses_above + bisect.bisect_right(_LENGTHS_TOKENS, len(node.tokens) // TOKEN_BYTES)


def _marks(leaf: Node) -> tuple[tuple[int, int], ...]:
    """Return index and hash of a leaf's last whole block, and of those at three, two and one quarters of it."""
    num_whole_blocks = len(leaf.tokens) // (leaf.owner.block_size * TOKEN_BYTES)
    indices = sorted({num_whole_blocks * quarters // 4 - 1 for quarters in (4, 3, 2, 1)}, reverse=True)
    return tuple((index, _block_digest(leaf, index)) for index in indices if index >= 0)


def _num_equal_blocks(leaf: Node, stay: _Stay) -> int:
    """Count the blocks of a leaf that are the same as before its eviction. The first one always is."""
    for place, (index, digest) in enumerate(stay.marks):
        if _block_digest(leaf, index) == digest:
            return stay.num_blocks if place == 0 else index + 1
    return 1


def _block_digest(leaf: Node, index: int) -> int:
    block_bytes = leaf.owner.block_size * TOKEN_BYTES
    return xxh3_64_intdigest(leaf.tokens[index * block_bytes : (index + 1) * block_bytes])
