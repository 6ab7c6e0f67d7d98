"""Deletes blocks from the tiers, and retries deletions that failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.retried_calls import RetriedCalls
from radixkv.offload.tiers.tier import Tier


class _DeleteTask(NamedTuple):
    """Keys of blocks to delete from a tier."""

    tier: str
    keys: Sequence[bytes]


class Deleter:
    """Deletes blocks from tiers. Failed deletions are retried later, in one call per tier.

    Until a deletion succeeds, the tier may hold blocks that are not in the index, but that the next process would find.

    Args:
        offload_index: knows which blocks have been stored again.
        tiers: the tiers by name.
        wake: called on any thread when a call has failed, so that the engine calls `retry`.
    """

    def __init__(
        self, offload_index: OffloadIndex, tiers: Mapping[str, Tier], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._index = offload_index
        self._tiers = tiers
        self._calls = RetriedCalls[_DeleteTask](wake)

    def delete(self, name: str, keys: Sequence[bytes]) -> Future[int | None]:
        """Delete blocks from a tier. Returns a future of the number of deleted blocks; None if the call fails."""
        deleted = self._tiers[name].delete(keys)
        self._calls.start(_DeleteTask(name, keys), deleted)
        return deleted

    def delete_unknown(self, name: str, keys: Sequence[bytes]) -> None:
        """Delete those blocks from a tier that are not in its index.

        Whether a block that is being saved must be deleted is known only after the save, so a later `retry` decides it.
        """
        tier_index = self._index.tiers[name]
        if useless := [key for key in keys if key not in tier_index]:
            self.delete(name, useless)
        if undecided := [key for key in keys if key in tier_index and not tier_index.holds(key)]:
            self._calls.add_failed(_DeleteTask(name, undecided))

    @property
    def has_failed(self) -> bool:
        """Whether there are deletions to retry."""
        return self._calls.has_failed

    def unconfirmed(self, name: str) -> list[bytes]:
        """List the keys of a tier whose deletion is not confirmed. Complexity: O(unconfirmed keys of all tiers)."""
        return [key for tier, keys in self._calls.unconfirmed() if tier == name for key in keys]

    def retry(self) -> None:
        """Retry failed deletions, except of blocks that have been stored again.

        Complexity: O(keys of failed calls).
        """
        failed_keys: dict[str, dict[bytes, None]] = {}
        for name, keys in self._calls.take_failed():
            failed_keys.setdefault(name, {}).update(dict.fromkeys(keys))
        for name, unique_keys in failed_keys.items():
            self.delete_unknown(name, list(unique_keys))

    def finish(self, limit_s: float) -> bool:
        """Retry failed deletions, and wait for all calls, at most `limit_s`. Returns whether everything is deleted."""
        self.retry()
        return self._calls.wait(limit_s)
