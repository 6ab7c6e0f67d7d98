"""The default eviction policy: it tries three orders on samples of the traffic and follows the best one."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from radixkv.api.miss_reason import MissReason
from radixkv.cache.policies.lifetimes import ReuseCounts
from radixkv.cache.policies.order_trial import FOREVER_S, Order, OrderTrial
from radixkv.cache.policies.policy import EvictionPolicy, used_nodes
from radixkv.cache.policies.shadow_cache import Sample
from radixkv.cache.tree.node import Node
from radixkv.tokens import TOKEN_BYTES

# Nine kinds of nodes that were never used: below a parent with no, one, or more uses, each by three lengths. Four kinds
# of others, by uses: 1, 2 to 3, 4 to 7, more. docs/LOG.md says what other kinds win or lose.
_LENGTHS_TOKENS = (1024, 8192)
_NUM_KINDS = 13
# Uses and insertions between two plans; a plan takes 0.5 ms. A quarter or four times as many make no difference on the
# conversation trace. In a cache of few blocks uses return sooner, so half as many events as blocks do.
_EVENTS_A_PLAN = 256
_LEAST_EVENTS_A_PLAN = 16
_KEPT_AN_EVENT = 0.99 ** (1 / 256)  # what was learned halves within 18,000 events
_LEAST_GHOSTS = 4096  # for a cache of a few blocks


class _Stay(NamedTuple):
    """A node's state when it was last used.

    Attributes:
        kind: the kind of node, 0 to 12.
        num_blocks: its blocks then; some may have been evicted since.
        num_uses: its uses, those before it was evicted included.
        samples: its blocks that the shadow caches follow.
        marks: index and hash of a few of its whole blocks, the last one first; taken when some are evicted.
        ghost: what is remembered of it, if it was evicted and came back, perhaps in several chunks.
        num_returned_blocks: blocks that came back so far.
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


class BestOfThreeOrders(EvictionPolicy):
    """Evicts leaves in whichever of three orders has had the most hits lately; see `OrderTrial`.

    The orders are: least recently used; never reused, then least recently used; and learned lifetimes. So this policy
    is never much worse than the first two, and what it learns decides only while that has more hits.

    Learned lifetimes: a leaf is of one of 13 kinds, by its uses, its parent's uses and its length. For each kind the
    policy counts after how many seconds blocks are used again, those that were evicted too early included. From these
    counts it plans a lifetime for each kind, so that all blocks just fit and have the most hits:

        hits(kind, lifetime)   blocks used again within the lifetime
        room(kind, lifetime)   block seconds that they take: until the use, or until the lifetime ends
        plan                   for each kind the lifetime with the greatest hits - price * room,
                               at the price for which all room together is num_blocks * seconds

    Of the two plans on either side of that price, a fixed share of the nodes follows the one with longer lifetimes. So
    a part of a loop that is larger than the cache stays. If all lifetimes are equal, the order is that of last use.

    Memory: as many evicted leaves as the cache has blocks, and about a thousand sampled blocks for each order.

    Complexity: O(1) for a key; O(depth) for a use; O(tokens of the path) for an insertion; half a millisecond for a
    plan, once in 256 events. The order changes at most once while a tenth of the cache is filled.

    Source: choosing between orders on samples: Qureshi et al.: "Adaptive insertion policies for high performance
    caching" (set dueling), ISCA 2007, with samples as in SHARDS and McNemar's test. Lifetimes: Beckmann, Chen, Cidon:
    "LHD: Improving cache hit rate by maximizing hit density", NSDI 2018, chosen ahead so that they are a sort key. Uses
    as kinds: Wang et al.: "KVCache cache in the wild", ATC 2025.

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
        self._trial = OrderTrial(num_blocks)

    def key(self, node: Node) -> float:
        """Return the time at which its lifetime ends in the order in force."""
        if self._trial.order == Order.LIFETIMES:
            return node.last_used_s + self._learned_lifetime_s(node)
        is_kept = self._trial.order == Order.REUSED_LAST and node.num_uses > 0
        return node.last_used_s + (FOREVER_S if is_kept else 0.0)

    def _learned_lifetime_s(self, node: Node) -> float:
        stay: _Stay = node.policy_note
        short_s, long_s = self._lifetimes_s[stay.kind]
        return long_s if node.fingerprint < self._long_share * 2.0**64 else short_s

    def are_alike(self, upper: Node, lower: Node) -> bool:
        """Return whether both are of one kind."""
        above: _Stay = upper.policy_note
        below: _Stay = lower.policy_note
        return above.kind == below.kind

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Learn from the nodes of the path that were found whole, the last ones of a deep path."""
        for used in used_nodes(node, num_bytes):
            self._use(used, used.last_used_s, now_s)
        self._tick(now_s)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Learn from the use of the upper half; the lower half still waits for its next use."""
        self.cut(lower)
        upper, stay = lower.parent, lower.policy_note
        assert upper is not None
        self._use(upper, last_used_s, now_s)
        lower.policy_note = stay._replace(kind=_kind(lower, stay.num_uses))
        self._counts.stays[stay.kind] -= stay.num_blocks
        self._counts.stays[lower.policy_note.kind] += stay.num_blocks

    def cut(self, lower: Node) -> None:
        """Divide the note between both halves."""
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

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Join their notes."""
        stay: _Stay = lower.policy_note
        samples: list[Sample] = []
        num_blocks = 0
        for upper in uppers:
            samples += (Sample(place + num_blocks, digest) for place, digest in upper.policy_note.samples)
            num_blocks += upper.num_blocks
        samples += (Sample(place + num_blocks, digest) for place, digest in stay.samples)
        marks = tuple((index + num_blocks, digest) for index, digest in stay.marks)
        lower.policy_note = stay._replace(
            num_blocks=stay.num_blocks + num_blocks, samples=tuple(samples), marks=marks, ghost=None
        )

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Start to wait for its next use. If it was evicted before, learn how long it should have stayed."""
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
        self._try(leaf, stay.samples, now_s)
        self._tick(now_s)
        self._filled(leaf.num_blocks)

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Wait for the new blocks as well. If they were evicted before, learn how long they should have stayed."""
        stay: _Stay = leaf.policy_note
        num_new_blocks = max(0, leaf.num_blocks - stay.num_blocks)  # others were evicted since `stay` and are back
        samples = self._trial.sample(leaf, stay.samples[-1].place + 1 if stay.samples else 0)
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

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Mark some of its blocks, and remember the leaf once all of it is gone."""
        stay: _Stay = leaf.policy_note._replace(ghost=None)
        if not stay.marks:
            leaf.policy_note = stay = stay._replace(marks=_marks(leaf))
        if num_blocks == leaf.num_blocks:
            self._ghosts[leaf.fingerprint] = _Ghost(leaf.last_used_s, stay)
            if len(self._ghosts) > max(_LEAST_GHOSTS, self._num_blocks):
                self._ghosts.popitem(last=False)

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

    def _try(self, node: Node, samples: tuple[Sample, ...], now_s: float) -> None:
        self._trial.use(node.owner.block_size, samples, now_s, now_s + self._learned_lifetime_s(node))

    def _filled(self, num_blocks: int) -> None:
        if self._trial.filled(num_blocks):
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
