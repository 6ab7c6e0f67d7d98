"""The default eviction policy: it tries three orders on samples of the traffic, and follows the best."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import OrderedDict
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from radixkv.cache.node import Node
from radixkv.cache.policies.lifetimes import ReuseCounts
from radixkv.cache.policies.policy import EvictionPolicy, used_nodes
from radixkv.cache.policies.shadow_cache import BlockSampler, Sample, ShadowCache
from radixkv.tokens import TOKEN_BYTES

# Nine kinds of nodes that were never used: below a parent with no, one, more uses, each by length. Four kinds of
# others, by uses: 1, 2 to 3, 4 to 7, more. What other kinds win or lose is in docs/LOG.md.
_LENGTHS_TOKENS = (1024, 8192)
_NUM_KINDS = 13
# Uses and insertions between two plans; a plan takes 0.5 ms. A quarter or four times of it makes no difference on the
# trace. In a cache of a few blocks uses return sooner: half as many events as blocks do then.
_EVENTS_A_PLAN = 256
_LEAST_EVENTS_A_PLAN = 16
_KEPT_AN_EVENT = 0.99 ** (1 / 256)  # what was learned halves within 18,000 events
_LEAST_GHOSTS = 4096  # for a cache of a few blocks

# One turn is as many inserted blocks as the cache has. A change of order gives all leaves new keys, so it waits for a
# tenth of one; lifetimes are given four to be learned. Another order must lead by twice the noise. What other values do
# is in docs/LOG.md.
_TURNS_A_VERDICT = 0.1
_TURNS_TO_LEARN = 4.0
_TURNS_TO_HALVE = 2.0
_LEAST_DEVIATIONS = 2.0
_FOREVER_S = 2.0**30


class _Order(IntEnum):
    LAST_USE = 0
    REUSED_LAST = 1
    LIFETIMES = 2


class _Stay(NamedTuple):
    """What was true of a node when it was last used.

    Attributes:
        kind: what kind of node it was.
        num_blocks: its blocks then; some may have been evicted since.
        num_uses: how often it was used, also before it was evicted.
        samples: its blocks that the shadow caches follow.
        marks: index and hash of a few of its whole blocks, the last one first; taken once some are evicted.
        ghost: what it was before, if it was evicted and came back; it may come back in several chunks.
        num_returned_blocks: how many blocks came back so far.
    """

    kind: int
    num_blocks: int
    num_uses: int = 0
    samples: tuple[Sample, ...] = ()
    marks: tuple[tuple[int, int], ...] = ()
    ghost: _Ghost | None = None
    num_returned_blocks: int = 0


class _Ghost(NamedTuple):
    """What is remembered of an evicted leaf."""

    last_used_s: float
    stay: _Stay


class BestOfThreeOrders(EvictionPolicy):
    """The leaf goes first that does so in the order which has had the most hits lately.

    The orders are: least recently used; never reused, then least recently used; and learned lifetimes. A shadow cache
    for each follows a sample of the blocks. Two orders are compared on the blocks that one of them had and the other
    had not; the order in force gives way to one that leads by more than chance would have it, and the leaves get new
    keys. So it is never much worse than the first two, and what it learns decides only while that wins.

    Learned lifetimes: leaves are of a few kinds, by how often they were used, where they hang and how long they are.
    For each kind the policy counts after how many seconds blocks are used again, also those that it evicted too early:
    it remembers them. From the counts it plans a lifetime for each kind, so that all blocks together just fit and hits
    are the most:

        hits(kind, lifetime)   blocks used again within the lifetime
        room(kind, lifetime)   block seconds that it takes: until the use, or until the lifetime ends
        plan                   for each kind the lifetime with the greatest hits - price * room,
                               at the price for which all room together is num_blocks * seconds

    Between two plans on both sides of that price, a fixed share of the nodes has the longer lifetimes. So of a loop
    larger than the cache a part stays, rather than nothing. If all lifetimes are equal the order is that of last use.

    Complexity: O(1) for a key; O(depth) for a use and O(tokens of the path) for an insertion, and O(log n) for each
    sampled block of it, at most one in 512 tokens; half a millisecond for a plan once in 256 events. The order changes
    at most once while a tenth of the cache is filled. Remembers as many evicted leaves as there are blocks, and a
    thousand sampled blocks for each order.

    Source: the choice between orders is that of Qureshi et al.: "Adaptive insertion policies for high performance
    caching" (set duelling), ISCA 2007, on samples as in SHARDS, by McNemar's test; the lifetimes are those of
    Beckmann, Chen, Cidon: "LHD: Improving cache hit rate by maximizing hit density", NSDI 2018, chosen ahead, so that
    they are a sort key; uses as kinds are those of Wang et al.: "KVCache cache in the wild", ATC 2025.

    Args:
        num_blocks: blocks of the cache's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._counts = ReuseCounts(_NUM_KINDS)
        self._lifetimes_s = [(0.0, 0.0)] * _NUM_KINDS  # short and long
        self._long_share = 0.0
        self._events_a_plan = min(_EVENTS_A_PLAN, max(_LEAST_EVENTS_A_PLAN, num_blocks // 2))
        self._num_events = 0
        self._last_event_s: float | None = None
        self._ghosts: OrderedDict[int, _Ghost] = OrderedDict()
        self._sampler = BlockSampler(num_blocks)
        self._shadows = [ShadowCache() for _ in _Order]
        self._order = _Order.LIFETIMES  # the same as last use until they are learned
        self._wins = [[0.0] * len(_Order) for _ in _Order]  # sampled blocks that one had lately and the other had not
        self._num_new_blocks = 0  # since the last verdict
        self._num_turns = 0.0

    def key(self, node: Node) -> float:
        """When its lifetime ends, in seconds, in the order in force."""
        if self._order == _Order.LIFETIMES:
            return node.last_used_s + self._learned_lifetime_s(node)
        is_kept = self._order == _Order.REUSED_LAST and node.num_uses > 0
        return node.last_used_s + (_FOREVER_S if is_kept else 0.0)

    def _learned_lifetime_s(self, node: Node) -> float:
        stay: _Stay = node.policy_note
        short_s, long_s = self._lifetimes_s[stay.kind]
        return long_s if node.fingerprint < self._long_share * 2.0**64 else short_s

    # -- what happens ----------------------------------------------------------------------------------------------

    def reused(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Learn from each node of the path that was found to its end. Complexity: O(depth)."""
        for used in used_nodes(node, num_bytes):
            self._use(used, used.last_used_s, now_s)
        self._tick(now_s)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Learn from the upper half; the lower one goes on waiting."""
        self.cut(lower)
        upper, stay = lower.parent, lower.policy_note
        assert upper is not None
        self._use(upper, last_used_s, now_s)
        lower.policy_note = stay._replace(kind=_kind(lower, stay.num_uses))
        self._counts.stays[stay.kind] -= stay.num_blocks
        self._counts.stays[lower.policy_note.kind] += stay.num_blocks

    def cut(self, lower: Node) -> None:
        """Divide what was noted between both halves."""
        upper = lower.parent
        assert upper is not None
        cut = upper.num_blocks
        stay: _Stay = lower.policy_note
        upper.policy_note = _Stay(
            stay.kind, cut, stay.num_uses, tuple(each for each in stay.samples if each.place < cut)
        )
        lower.policy_note = _Stay(
            stay.kind,
            max(stay.num_blocks - cut, lower.num_blocks),
            stay.num_uses,
            tuple(Sample(index - cut, digest) for index, digest in stay.samples if index >= cut),
            tuple((index - cut, digest) for index, digest in stay.marks if index >= cut),
        )

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Start waiting for its next use. If it was evicted before, learn what its lifetime should have been."""
        before: _Stay | None = leaf.policy_note
        if before is not None:
            self._grown(leaf, before, now_s)
            return
        num_uses = num_blocks = 0
        ghost = self._ghosts.pop(leaf.fingerprint, None)
        if ghost is not None:
            num_blocks = _num_equal_blocks(leaf, ghost.stay)
            self._counts.hit(ghost.stay.kind, num_blocks, now_s - ghost.last_used_s)
            if 2 * num_blocks >= leaf.num_blocks:  # mostly the same tokens as before
                num_uses = ghost.stay.num_uses + 1
        self._wait(leaf, num_uses, self._sampler.sample(leaf, 0))
        stay: _Stay = leaf.policy_note
        leaf.policy_note = stay._replace(ghost=ghost, num_returned_blocks=num_blocks)
        self._try(leaf, stay.samples, now_s)
        self._tick(now_s)
        self._filled(leaf.num_blocks)

    def evicted(self, leaf: Node, num_blocks: int, now_s: float) -> None:
        """Mark what it was, and remember it once all of it is gone."""
        stay: _Stay = leaf.policy_note._replace(ghost=None)
        if not stay.marks:
            leaf.policy_note = stay = stay._replace(marks=_marks(leaf))
        if num_blocks == leaf.num_blocks:
            self._ghosts[leaf.fingerprint] = _Ghost(leaf.last_used_s, stay)
            if len(self._ghosts) > max(_LEAST_GHOSTS, self._num_blocks):
                self._ghosts.popitem(last=False)

    def _grown(self, leaf: Node, stay: _Stay, now_s: float) -> None:
        num_new_blocks = max(0, leaf.num_blocks - stay.num_blocks)
        samples = self._sampler.sample(leaf, stay.samples[-1].place + 1 if stay.samples else 0)
        stay = stay._replace(num_blocks=stay.num_blocks + num_new_blocks, samples=stay.samples + samples)
        if stay.ghost is not None:
            num_blocks = max(stay.num_returned_blocks, _num_equal_blocks(leaf, stay.ghost.stay))
            num_more_blocks = num_blocks - stay.num_returned_blocks
            self._counts.hit(stay.ghost.stay.kind, num_more_blocks, now_s - stay.ghost.last_used_s)
            stay = stay._replace(num_returned_blocks=num_blocks)
        leaf.policy_note = stay
        self._counts.stays[stay.kind] += num_new_blocks
        self._try(leaf, samples, now_s)
        self._filled(num_new_blocks)

    def _use(self, node: Node, last_used_s: float, now_s: float) -> None:
        stay: _Stay = node.policy_note
        self._counts.hit(stay.kind, stay.num_blocks, now_s - last_used_s)
        node.num_uses += 1
        self._wait(node, stay.num_uses + 1, stay.samples)
        self._try(node, stay.samples, now_s)

    def _wait(self, node: Node, num_uses: int, samples: tuple[Sample, ...]) -> None:
        stay = node.policy_note = _Stay(_kind(node, num_uses), node.num_blocks, num_uses, samples)
        self._counts.stays[stay.kind] += stay.num_blocks

    def _tick(self, now_s: float) -> None:
        if self._last_event_s is not None:
            self._counts.seconds += now_s - self._last_event_s
        self._last_event_s = now_s
        self._num_events += 1
        is_due = self._num_events % self._events_a_plan == 0
        if is_due or (self._num_events < self._events_a_plan and self._num_events.bit_count() == 1):  # no wait at first
            self._lifetimes_s, self._long_share = self._counts.plan(self._num_blocks)
        if is_due:
            self._counts.forget(_KEPT_AN_EVENT**self._events_a_plan)

    # -- the trial -------------------------------------------------------------------------------------------------

    def _try(self, node: Node, samples: tuple[Sample, ...], now_s: float) -> None:
        """Show sampled blocks of a node to each shadow cache, the deepest first, as it has to go before the others."""
        if not samples:
            return
        capacity = self._sampler.capacity(node.tree.block_size)
        digests = [digest for _, digest in reversed(samples)]
        end_s = now_s + self._learned_lifetime_s(node)
        keys = ((now_s, now_s), (now_s, now_s + _FOREVER_S), (end_s, end_s))  # by order: of new blocks, of held ones
        held = [shadow.use(digests, *pair, capacity) for shadow, pair in zip(self._shadows, keys, strict=True)]
        if not held[0] == held[1] == held[2]:
            for winner, loser in itertools.permutations(_Order, 2):
                self._wins[winner][loser] += sum(map(operator.gt, held[winner], held[loser]))

    def _filled(self, num_blocks: int) -> None:
        """Follow the best order from now on, if enough blocks are new since it was last asked which one that is."""
        self._num_new_blocks += num_blocks
        turns = self._num_new_blocks / self._num_blocks
        if turns < _TURNS_A_VERDICT:
            return
        self._num_new_blocks = 0
        self._num_turns += turns
        kept = 0.5 ** (turns / _TURNS_TO_HALVE)
        self._wins = [[wins * kept for wins in row] for row in self._wins]
        best = max(_Order, key=self._lead)
        noise = math.sqrt(self._wins[best][self._order] + self._wins[self._order][best])
        if self._num_turns > _TURNS_TO_LEARN and self._lead(best) > _LEAST_DEVIATIONS * noise:
            self._order = best
            self.generation += 1

    def _lead(self, order: _Order) -> float:
        """How many more sampled blocks an order had lately than the one in force."""
        return self._wins[order][self._order] - self._wins[self._order][order]


def _kind(node: Node, num_uses: int) -> int:
    if num_uses:
        return min(8 + num_uses.bit_length(), _NUM_KINDS - 1)
    assert node.parent is not None
    above: _Stay | None = node.parent.policy_note  # a root has none
    num_uses_above = 0 if above is None else min(above.num_uses, 2)
    return 3 * num_uses_above + bisect.bisect_right(_LENGTHS_TOKENS, len(node.tokens) // TOKEN_BYTES)


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
