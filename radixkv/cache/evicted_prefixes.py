"""Remembers evicted prefixes, to explain later misses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from typing import TypeVar

from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node
from radixkv.invocation import InvocationMarks

_T = TypeVar("_T")


class EvictedPrefixes(Listener):
    """Remembers why, and for whom, the last `capacity` prefixes were evicted, by fingerprint.

    Prefixes of an adapter that was unloaded are remembered when they are purged; other purged prefixes are not.

    A fingerprint only explains a miss and never decides which tokens are reused. The only effect of a collision is a
    wrong `miss_reason` in one response.

    Args:
        capacity: prefixes to remember.
        marks: identify the tokens that invoked adapters computed.
    """

    def __init__(self, capacity: int, marks: InvocationMarks) -> None:
        self._capacity = capacity
        self._marks = marks
        self._reasons: OrderedDict[int, MissReason] = OrderedDict()
        self._evicted_for_others: set[int] = set()
        self._purged_adapters: set[str] = set()  # digests of adapters that are being purged

    def __len__(self) -> int:
        return len(self._reasons)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Remember why a prefix was evicted, and forget the oldest one when full. Complexity: O(1)."""
        self._remember(fingerprint, reason)

    def purged(self, node: Node) -> None:
        """Remember a node whose adapter is being purged. Complexity: O(1)."""
        if self._purged_adapters and self._purged_adapters & {
            node.owner.namespace.adapter,
            self._marks.digest_of(node.tokens),
        }:
            self._remember(node.fingerprint, MissReason.ADAPTER_CHANGED)

    def remember_purged(self, adapter: str, slices: Generator[None, None, _T]) -> Generator[None, None, _T]:
        """Run the slices of a purge, and remember the nodes of an adapter, given by its digest, that they purge."""
        self._purged_adapters.add(adapter)
        try:
            return (yield from slices)
        finally:
            self._purged_adapters.discard(adapter)

    def reason(self, fingerprint: int) -> MissReason | None:
        """Return why the prefix with this fingerprint was evicted; None if unknown. Complexity: O(1)."""
        return self._reasons.get(fingerprint)

    def record_eviction_for_others(self, fingerprint: int) -> None:
        """Record that a prefix, which was evicted just now, was evicted for another tenant. Complexity: O(1)."""
        if fingerprint in self._reasons:
            self._evicted_for_others.add(fingerprint)

    def is_by_self(self, fingerprint: int) -> bool | None:
        """Return whether a prefix was evicted for its own tenant; None if unknown. Complexity: O(1)."""
        return fingerprint not in self._evicted_for_others if fingerprint in self._reasons else None

    def _remember(self, fingerprint: int, reason: MissReason) -> None:
        self._reasons[fingerprint] = reason
        self._reasons.move_to_end(fingerprint)
        self._evicted_for_others.discard(fingerprint)
        if len(self._reasons) > self._capacity:
            self._evicted_for_others.discard(self._reasons.popitem(last=False)[0])
