"""Remembers why prefixes left the cache, so that a later miss can be explained."""

from __future__ import annotations

from collections import OrderedDict

from radixkv.api.miss_reason import MissReason


class LostPrefixes:
    """Remembers fingerprints of prefixes that left the cache, newest `capacity` of them.

    A fingerprint only explains a miss. It never decides what is reused, so a collision costs a wrong word in an
    answer's `miss_reason` and nothing else.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[int, MissReason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def remember(self, fingerprint: int, reason: MissReason) -> None:
        """Note why a prefix left; forget the oldest note when full. Complexity: O(1)."""
        self._reasons[fingerprint] = reason
        self._reasons.move_to_end(fingerprint)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def reason(self, fingerprint: int) -> MissReason | None:
        """Why this prefix left, or None if that is not known. Complexity: O(1)."""
        return self._reasons.get(fingerprint)
