"""Prefixes that left the cache, remembered so that a later miss can be explained."""

from __future__ import annotations

from collections import OrderedDict

from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.tree.node import Node


class LostPrefixes(Listener):
    """Remembers why prefixes were evicted: the newest `capacity` of them, by fingerprint.

    A fingerprint only explains a miss. It never decides what is reused, so a collision costs a wrong `miss_reason` in
    one answer and nothing else.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[int, MissReason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Note why a prefix left; forget the oldest note when full. Complexity: O(1)."""
        self._reasons[fingerprint] = reason
        self._reasons.move_to_end(fingerprint)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def reason(self, fingerprint: int) -> MissReason | None:
        """Tell why the prefix with this fingerprint left; None if that is not known. Complexity: O(1)."""
        return self._reasons.get(fingerprint)
