"""A `LoadOrCompute` that always loads, for tests of loads."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.offload.load_or_compute import LoadOrCompute


class AlwaysLoad(LoadOrCompute):
    """Always loads stored blocks, and looks up those that may be stored, however long that takes."""

    def choose(self, start_token: int, tiers: Sequence[str]) -> int:
        """Choose all blocks."""
        return len(tiers)

    def is_lookup_worthwhile(self, tier: str, start_token: int, num_tokens: int) -> bool:
        """Return True."""
        return True
