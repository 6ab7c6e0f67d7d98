"""The default eviction policy: learns how soon blocks are used again, and evicts what will give the fewest hits."""

from __future__ import annotations

import bisect
import copy
import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from radixkv.api.awaits import Awaits
from radixkv.api.miss_reason import MissReason
from radixkv.cache.eviction_policy import EvictionPolicy, used_nodes
from radixkv.cache.node import Node
from radixkv.tokens import TOKEN_BYTES

# Kinds of nodes that were never reused: by the uses of the parent (none, one, more) and by length (three ranges). Kinds
# of reused nodes: by pace, in octaves from 2**-20 s to an hour. Each kind exists once per value of `Awaits`.
_LENGTHS_TOKENS = (1024, 8192)
_NUM_NEW_KINDS = 9
_SHORTEST_LOG_PACE = -20
_NUM_PACES = 32
_NUM_KINDS = _NUM_NEW_KINDS + _NUM_PACES  # of one value of `Awaits`
_PACE_STEP = 0.25  # weight of the last gap in the pace; docs/LOG.md compares other values

# Ages are counted in half octaves from 2**-20 s to 2**21.5 s (five weeks); the last one counts all greater ages, too.
_AGES_PER_OCTAVE = 2
_SHORTEST_LOG_AGE = -20
_NUM_AGES = 42 * _AGES_PER_OCTAVE
_AGES_S = np.exp2(_SHORTEST_LOG_AGE + np.arange(_NUM_AGES) / _AGES_PER_OCTAVE)  # [num_ages], upper edges
_WIDTHS_S = np.diff(_AGES_S, prepend=0.0)  # [num_ages]
_SHORTEST_AGE_S = float(_AGES_S[0])
_MIN_UNUSED_SHARE = 1e-3  # at least this share of blocks is assumed to be never reused

_PRIOR_WAITS = 30  # waits of nodes; after this many, a kind has the geometric mean of its own and its group's density
_TINY_DENSITY = 1e-12

_REFILLS_TO_LEARN = 4  # one refill is the insertion of as many blocks as the cache has
# Uses and insertions between two updates of the densities, which take 1 to 4 ms.
_EVENTS_PER_UPDATE = 256
_MIN_EVENTS_PER_UPDATE = 16  # in a small cache, whose blocks are reused sooner
_KEPT_PER_EVENT = 0.99 ** (1 / 256)  # counts are halved within 18,000 events
_MIN_GHOSTS = 4096  # for a cache of a few blocks

Counts = npt.NDArray[np.float64]


class HitDensities:
    """Learns for each kind of node how many hits it has per block second, depending on how long it has waited.

    Attributes:
        hits: `[num_kinds][num_ages]`, blocks used again, by age.
        block_waits: `[num_kinds]`, number of blocks that began to wait for their next use.
        node_waits: `[num_kinds]`, number of nodes that began to wait for their next use.
    """

    def __init__(self) -> None:
        num_kinds = _NUM_KINDS * len(Awaits)
        self.hits = [[0.0] * _NUM_AGES for _ in range(num_kinds)]
        self.block_waits = [0.0] * num_kinds
        self.node_waits = [0.0] * num_kinds
        self._densities: list[list[float]] = []

    def hit(self, kind: int, num_blocks: int, log_age: float) -> None:
        """Record that blocks were used again at this age, given as log2 of seconds. Complexity: O(1)."""
        self.hits[kind][_age_index(log_age)] += num_blocks

    def wait(self, kind: int, num_blocks: int, num_nodes: int = 1) -> None:
        """Record that blocks of a node began to wait for their next use. Complexity: O(1)."""
        self.block_waits[kind] += num_blocks
        self.node_waits[kind] += num_nodes

    def move(self, kind: int, new_kind: int, num_blocks: int) -> None:
        """Record that the kind of a waiting node has changed."""
        self.wait(kind, -num_blocks, -1)
        self.wait(new_kind, num_blocks)

    def forget(self, factor: float) -> None:
        """Multiply all counts by `factor`, a number below 1."""
        self.hits = [[each * factor for each in row] if any(row) else row for row in self.hits]
        self.block_waits = [each * factor for each in self.block_waits]
        self.node_waits = [each * factor for each in self.node_waits]

    def density(self, kind: int, age_s: float) -> float:
        """Return the expected hits per block second of a node of this kind and age. Complexity: O(1)."""
        return self._densities[kind][_age_index(_log_age(age_s))]

    def update(self) -> None:
        """Compute the densities from the counts.

        The density of a kind at an age is the maximum, over all later ages, of the blocks that are used again between
        the two ages divided by the block seconds that blocks waited in between. The fewer nodes of a kind have waited,
        the more this is adjusted to the density of its group: the new or the reused nodes of the same `Awaits`.

        Complexity: constant; it takes 1 to 4 ms, depending on how many kinds and ages have been seen.
        """
        shape = (len(Awaits), _NUM_KINDS, _NUM_AGES)
        hits = np.array(self.hits).reshape(shape)
        # `move` subtracts what `wait` added, although `forget` has reduced that in the meantime.
        block_waits = np.maximum(np.array(self.block_waits), 0.0).reshape(shape[:2])
        node_waits = np.maximum(np.array(self.node_waits), 0.0).reshape(shape[:2])
        groups = (slice(_NUM_NEW_KINDS), slice(_NUM_NEW_KINDS, None))  # never reused, reused
        kind_densities = _compute_densities(hits.reshape(-1, _NUM_AGES), block_waits.reshape(-1)).reshape(shape)
        weights = _PRIOR_WAITS / (_PRIOR_WAITS + node_waits)[..., None]
        blended = np.empty(shape)
        for group in groups:
            group_hits, group_waits = hits[:, group].sum(axis=1), block_waits[:, group].sum(axis=1)
            group_densities = _compute_densities(group_hits, group_waits)  # [num_awaits, num_ages]
            # The density of a group falls with age, so that a kind without counts of its own is in LRU order.
            np.minimum.accumulate(group_densities, axis=1, out=group_densities)
            kind_logs = np.log(kind_densities[:, group] + _TINY_DENSITY)
            group_logs = np.log(group_densities + _TINY_DENSITY)[:, None]
            blended[:, group] = kind_logs + weights[:, group] * (group_logs - kind_logs)
        self._densities = np.exp(blended).reshape(-1, _NUM_AGES).tolist()


def _compute_densities(hits: Counts, block_waits: Counts) -> Counts:
    """Return the density of each row at each age.

    Args:
        hits: `[num_rows, num_ages]`, blocks used again, by age.
        block_waits: `[num_rows]`, blocks that waited, whether they were used again or not.
    """
    densities = np.zeros_like(hits)
    rows, ages = np.flatnonzero(hits.any(axis=1)), np.flatnonzero(hits.any(axis=0))
    if not ages.size:
        return densities
    first, end = max(0, int(ages[0]) - 4 * _AGES_PER_OCTAVE), int(ages[-1]) + 1
    hits = hits[rows, first:end]
    num_used_until = hits.cumsum(axis=1)  # [num_rows, num_ages]
    block_waits = np.maximum(block_waits[rows], (1 + _MIN_UNUSED_SHARE) * num_used_until[:, -1])[:, None]
    widths_s = _WIDTHS_S[first:end].copy()
    block_seconds = ((block_waits - num_used_until + hits / 2) * widths_s).cumsum(axis=1)
    max_densities = np.zeros_like(hits)
    for age in range(end - first):
        num_used, num_seconds = num_used_until[:, age:], block_seconds[:, age:]
        if age:
            num_used = num_used - num_used_until[:, age - 1, None]
            num_seconds = num_seconds - block_seconds[:, age - 1, None]
        max_densities[:, age] = (num_used / num_seconds).max(axis=1)
    densities[rows, first:end] = max_densities
    densities[rows, :first] = max_densities[:, :1]
    return densities


def _log_age(age_s: float) -> float:
    """Return log2 of an age in seconds; ages below the shortest one count as that."""
    return math.log2(max(age_s, _SHORTEST_AGE_S))


def _age_index(log_age: float) -> int:
    return min(_NUM_AGES - 1, max(0, math.ceil((log_age - _SHORTEST_LOG_AGE) * _AGES_PER_OCTAVE)))


class _ReuseHistory:
    """The policy's note on a node: its blocks that were used before, and new ones after them.

    Attributes:
        kind: the kind of the used blocks.
        num_blocks: used blocks; some may have been evicted since.
        new_kind: the kind of the new blocks.
        num_new_blocks: new blocks, which no request has found; some may have been evicted since.
        num_uses: uses of the node, including those before an eviction.
        log_pace: moving average of log2 of the seconds between its uses.
        marks: index and hash of a few of its whole blocks, the last block first; recorded when blocks are evicted.
        ghost: the record of the eviction of the node, or of its last blocks, while these are published again.
        num_returned_blocks: number of leading blocks that were published again or never evicted; `ghost` waits for the
            blocks after them.
        prior_use_s: time of the last use, if blocks were loaded since ahead of the next one; None if not.
    """

    __slots__ = (
        "ghost",
        "kind",
        "log_pace",
        "marks",
        "new_kind",
        "num_blocks",
        "num_new_blocks",
        "num_returned_blocks",
        "num_uses",
        "prior_use_s",
    )

    def __init__(self) -> None:
        self.kind = _NUM_NEW_KINDS
        self.num_blocks = 0
        self.new_kind = 0
        self.num_new_blocks = 0
        self.num_uses = 0
        self.log_pace = 0.0
        self.marks: tuple[tuple[int, int], ...] = ()
        self.ghost: _Ghost | None = None
        self.num_returned_blocks = 0
        self.prior_use_s: float | None = None

    def use(self, log_age: float, num_blocks: int) -> None:
        """Begin to wait again after a use of `num_blocks` blocks at this age."""
        self.log_pace += (log_age - self.log_pace) * (_PACE_STEP if self.num_uses else 1.0)
        self.num_uses += 1
        self.num_blocks, self.num_new_blocks = num_blocks, 0
        self.marks, self.ghost, self.prior_use_s = (), None, None
        self.kind = _NUM_NEW_KINDS + min(max(math.floor(self.log_pace) - _SHORTEST_LOG_PACE, 0), _NUM_PACES - 1)

    def restore(self, before: _ReuseHistory, num_blocks: int, last_used_s: float) -> None:
        """Wait for the same use as before the eviction, with the first `num_blocks` blocks."""
        self.prior_use_s = last_used_s
        self.kind, self.new_kind = before.kind, before.new_kind
        self.num_uses, self.log_pace = before.num_uses, before.log_pace
        self.num_blocks = min(num_blocks, before.num_blocks)
        self.num_new_blocks = num_blocks - self.num_blocks

    def cut(self, num_blocks: int) -> _ReuseHistory:
        """Remove the first blocks, and return their history."""
        upper = _ReuseHistory()
        upper.kind, upper.new_kind = self.kind, self.new_kind
        upper.num_uses, upper.log_pace = self.num_uses, self.log_pace
        upper.prior_use_s = self.prior_use_s
        upper.num_blocks = min(num_blocks, self.num_blocks)
        upper.num_new_blocks = num_blocks - upper.num_blocks
        self.num_blocks -= upper.num_blocks
        self.num_new_blocks = max(0, self.num_new_blocks - upper.num_new_blocks)
        self.marks = tuple((index - num_blocks, digest) for index, digest in self.marks if index >= num_blocks)
        self.ghost = None
        if not self.num_blocks:
            self.num_uses = 0
        return upper


class _Ghost(NamedTuple):
    """Record of an evicted leaf."""

    last_used_s: float
    history: _ReuseHistory


class AdaptivePolicy(EvictionPolicy):
    """Evicts the leaf with the fewest expected hits per block second.

    A leaf is of a kind: by what its session awaits, and by its pace (a moving average of the time between its uses) or,
    if it was never reused, by its parent's uses and its length. For each kind the policy records after how many seconds
    blocks are used again, including those that were evicted too early; see `HitDensities`. Leaves of a session that has
    ended are evicted before all others. Until the cache has been filled four times, the order is that of last use.

    Memory: a record per evicted leaf, at most one per block of the cache, or 4,096 in a smaller cache.

    Complexity: O(depth) for a use; O(1) for everything else; 1 to 4 ms after every 16 to 256 uses and
    insertions, depending on the size of the cache.

    Source: Beckmann, Chen, Cidon: "LHD: Improving cache hit rate by maximizing hit density", NSDI 2018. Kinds by reuse:
    Wang et al.: "KVCache cache in the wild", ATC 2025.

    Args:
        num_blocks: blocks of the cache's pool.
    """

    has_kinds = True

    def __init__(self, num_blocks: int) -> None:
        self.densities = HitDensities()
        self._num_blocks = num_blocks
        self._num_new_blocks = 0
        self._events_per_update = min(_EVENTS_PER_UPDATE, max(_MIN_EVENTS_PER_UPDATE, num_blocks // 2))
        self._num_events = 0
        self._ghosts: OrderedDict[int, _Ghost] = OrderedDict()

    def key(self, node: Node) -> float:
        """Return the time since which a node waits for its next use.

        Until the policy has learned, blocks that are loaded ahead of their next use count as used at that time.
        """
        return _last_use_s(node, node.last_used_s) if self._has_learned else node.last_used_s

    def kind(self, node: Node) -> int:
        """Return the kind of the last block of a node."""
        history: _ReuseHistory = node.policy_note
        return history.new_kind if node.num_blocks > history.num_blocks else history.kind

    def num_offered_blocks(self, leaf: Node) -> int:
        """Count the blocks at a leaf's end that are of one kind."""
        history: _ReuseHistory = leaf.policy_note
        num_new_blocks = leaf.num_blocks - history.num_blocks
        return num_new_blocks if num_new_blocks > 0 else leaf.num_blocks

    def worth(self, kind: int, key: float, now_s: float) -> float:
        """Return the expected hits per block second of a leaf. Complexity: O(1)."""
        if kind >= _NUM_KINDS * Awaits.NOTHING:
            return -1.0
        if not self._has_learned:
            return 1 / max(now_s - key, _SHORTEST_AGE_S)
        return self.densities.density(kind, now_s - key)

    @property
    def _has_learned(self) -> bool:
        return self._num_new_blocks >= _REFILLS_TO_LEARN * self._num_blocks

    def are_alike(self, upper: Node, lower: Node) -> bool:
        """Return whether all blocks of the upper node and the first ones of the lower node are of one kind."""
        above, below = upper.policy_note, lower.policy_note
        return self.kind(upper) == (below.kind if below.num_blocks else below.new_kind) and not (
            above.num_blocks and above.num_new_blocks
        )

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Record a use of the nodes of the path that were matched completely; see `used_nodes`."""
        for used in used_nodes(node, num_bytes):
            self._record_use(used, used.last_used_s, now_s)
        self._count_event()

    def loaded_ahead(self, node: Node, num_bytes: int) -> None:
        """Keep the time of the last use."""
        for loaded in used_nodes(node, num_bytes):
            loaded.policy_note.prior_use_s = _last_use_s(loaded, loaded.last_used_s)

    def note_awaits(self, node: Node) -> None:
        """Record what the last session that used a node waits for.

        After a tool call, new blocks at the end of reused ones are of the kind of these: the next prompt repeats both.
        """
        history: _ReuseHistory = node.policy_note
        kind = history.kind % _NUM_KINDS + _NUM_KINDS * node.awaits
        new_kind = history.new_kind % _NUM_KINDS + _NUM_KINDS * node.awaits
        if node.awaits is Awaits.TOOL and history.num_blocks:
            new_kind = kind
        if history.num_blocks:
            self.densities.move(history.kind, kind, history.num_blocks)
        if history.num_new_blocks:
            self.densities.move(history.new_kind, new_kind, history.num_new_blocks)
        history.kind, history.new_kind = kind, new_kind

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Record a use of the upper half. The lower half still waits for its next use."""
        self.cut(lower)
        assert lower.parent is not None
        self._record_use(lower.parent, last_used_s, now_s)

    def cut(self, lower: Node) -> None:
        """Divide the policy's note between both halves."""
        assert lower.parent is not None
        lower.parent.policy_note = lower.policy_note.cut(lower.parent.num_blocks)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Add the blocks of the other nodes to the note of the lowest."""
        history: _ReuseHistory = lower.policy_note
        num_blocks = sum(upper.num_blocks for upper in uppers)
        if history.num_blocks or uppers[-1].policy_note.num_blocks:
            history.num_blocks += num_blocks
        else:
            history.num_new_blocks += num_blocks
        history.marks = tuple((index + num_blocks, digest) for index, digest in history.marks)
        history.ghost = None

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Start to wait for the next use of a leaf. If it was evicted before, record the age of this use."""
        leaf.policy_note = history = _ReuseHistory()
        history.ghost = self._ghosts.pop(leaf.fingerprint, None)
        self._record_return(leaf, history, now_s)
        self._count_new_blocks(leaf, history)
        self._count_event()

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Start to wait for the next use of the new blocks. If they were evicted before, record the age of this use."""
        history: _ReuseHistory = leaf.policy_note
        self._record_return(leaf, history, now_s)
        self._count_new_blocks(leaf, history)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Record hashes of some blocks, and remember the leaf when all of it is evicted."""
        history: _ReuseHistory = leaf.policy_note
        history.ghost = None
        if not history.marks:
            history.marks = _mark_blocks(leaf)
        if num_blocks == leaf.num_blocks:
            self._ghosts[leaf.fingerprint] = _Ghost(_last_use_s(leaf, leaf.last_used_s), history)
            if len(self._ghosts) > max(_MIN_GHOSTS, self._num_blocks):
                self._ghosts.popitem(last=False)

    def _record_return(self, leaf: Node, history: _ReuseHistory, now_s: float) -> None:
        """Record a use of blocks that were evicted and are published again; or continue to wait for it."""
        if history.ghost is None:
            return
        last_used_s, before = history.ghost
        num_blocks = _num_equal_blocks(leaf, before)
        first = history.num_returned_blocks
        if num_blocks <= first:
            return
        history.num_returned_blocks = num_blocks
        if now_s <= last_used_s:  # they were loaded ahead of their next use
            history.restore(before, min(num_blocks, leaf.num_blocks), last_used_s)
            return
        num_used = max(0, min(num_blocks, before.num_blocks) - first)
        log_age = _log_age(now_s - last_used_s)
        self.densities.hit(before.kind, num_used, log_age)
        self.densities.hit(before.new_kind, num_blocks - first - num_used, log_age)
        ghost, num_new_blocks = history.ghost, history.num_new_blocks
        if not first:
            history.num_uses, history.log_pace = before.num_uses, before.log_pace
            history.use(log_age, 0)
            history.ghost = ghost
        num_here = min(num_blocks, leaf.num_blocks) - history.num_blocks  # some may be in a later chunk
        history.num_blocks += num_here
        num_moved = min(num_new_blocks, max(0, history.num_blocks + num_new_blocks - leaf.num_blocks))
        history.num_new_blocks = num_new_blocks - num_moved
        self.densities.wait(history.new_kind, -num_moved, 0)
        self.densities.wait(history.kind, num_here, not first)
        self._num_new_blocks += num_here - num_moved

    def _count_new_blocks(self, leaf: Node, history: _ReuseHistory) -> None:
        """Count the new blocks at the end of a leaf."""
        num_more_blocks = max(0, leaf.num_blocks - history.num_blocks - history.num_new_blocks)
        self._num_new_blocks += num_more_blocks
        if not num_more_blocks:
            return
        if history.num_new_blocks:
            self.densities.wait(history.new_kind, -history.num_new_blocks, -1)
        history.num_new_blocks += num_more_blocks
        history.new_kind = _new_kind(leaf, history)
        self.densities.wait(history.new_kind, history.num_new_blocks)

    def _record_use(self, node: Node, last_used_s: float, now_s: float) -> None:
        history: _ReuseHistory = node.policy_note
        last_used_s = _last_use_s(node, last_used_s)
        log_age = _log_age(now_s - last_used_s)
        num_used = min(history.num_blocks, node.num_blocks)
        self.densities.hit(history.kind, num_used, log_age)
        self.densities.hit(history.new_kind, node.num_blocks - num_used, log_age)
        ghost = None
        if history.marks:  # the last blocks were evicted, and may be published again by this request
            before = copy.copy(history)
            before.ghost = None
            ghost = _Ghost(last_used_s, before)
        history.use(log_age, node.num_blocks)
        history.ghost, history.num_returned_blocks = ghost, node.num_blocks
        node.num_uses += 1
        self.densities.wait(history.kind, history.num_blocks)

    def _count_event(self) -> None:
        self._num_events += 1
        is_due = self._num_events % self._events_per_update == 0
        if is_due:
            self.densities.forget(_KEPT_PER_EVENT**self._events_per_update)
        if is_due or self._num_events.bit_count() == 1:
            self.densities.update()


def _last_use_s(node: Node, last_used_s: float) -> float:
    """Return the time of the last use of a node; `last_used_s` may be the later time when it was loaded ahead."""
    history: _ReuseHistory = node.policy_note
    return last_used_s if history.prior_use_s is None else history.prior_use_s


def _new_kind(leaf: Node, history: _ReuseHistory) -> int:
    """Return the kind of a leaf's new blocks: by the number of uses of what is before them, and by their length."""
    assert leaf.parent is not None
    above: _ReuseHistory | None = history if history.num_blocks else leaf.parent.policy_note  # a root has none
    num_uses_above = 0 if above is None else min(above.num_uses, 2)
    num_tokens = len(leaf.tokens) // TOKEN_BYTES - history.num_blocks * leaf.owner.block_size
    return 3 * num_uses_above + bisect.bisect_right(_LENGTHS_TOKENS, num_tokens)


def _mark_blocks(leaf: Node) -> tuple[tuple[int, int], ...]:
    """Return index and hash of a leaf's last whole block, and of those at three, two and one quarters of it."""
    num_whole_blocks = len(leaf.tokens) // (leaf.owner.block_size * TOKEN_BYTES)
    indices = sorted({num_whole_blocks * quarters // 4 - 1 for quarters in (4, 3, 2, 1)}, reverse=True)
    return tuple((index, _block_digest(leaf, index)) for index in indices if index >= 0)


def _num_equal_blocks(leaf: Node, history: _ReuseHistory) -> int:
    """Estimate from the marks how many blocks of a leaf are those that it had before its eviction: at least one."""
    for place, (index, digest) in enumerate(history.marks):
        if _block_digest(leaf, index) == digest:
            return history.num_blocks + history.num_new_blocks if place == 0 else index + 1
    return 1


def _block_digest(leaf: Node, index: int) -> int:
    block_bytes = leaf.owner.block_size * TOKEN_BYTES
    return xxh3_64_intdigest(leaf.tokens[index * block_bytes : (index + 1) * block_bytes])
