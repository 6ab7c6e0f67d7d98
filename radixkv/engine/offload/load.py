"""Blocks on their way from stores, for all requests that wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.cache.elsewhere.found import Found
from radixkv.scheduling.request import Request
from radixkv.storage.device_copies import Copy
from radixkv.storage.tiers.block_object import ObjectFault, Wanted
from radixkv.storage.tiers.tier import Absence, LoadedBlock, Miss, Tier


class LoadedBlocks(NamedTuple):
    """The outcome of one call.

    Attributes:
        blocks: what came, by key.
        lost: keys of blocks that the store does not have, or not whole.
        is_timed: whether its time tells how long others will take: everything came.
    """

    blocks: dict[bytes, LoadedBlock]
    lost: list[bytes]
    is_timed: bool

    @classmethod
    def of(cls, keys: Sequence[bytes], loaded: Sequence[LoadedBlock | Miss] | None) -> LoadedBlocks:
        """Sort the answer of a store; None if the call was cancelled."""
        pairs = list(zip(keys, loaded or (), strict=False))
        blocks = {key: each for key, each in pairs if isinstance(each, LoadedBlock)}
        lost = [key for key, each in pairs if each is Absence.ABSENT or isinstance(each, ObjectFault)]
        return cls(blocks, lost, is_timed=len(blocks) == len(keys))


class Load:
    """A run of blocks that follow each other, loaded with one call for each store that has some of them.

    Attributes:
        run: the blocks, and where they are.
        started_s: time of the start.
        futures: of the calls.
        blocks: what has come, by key.
        requests: those that want it.
        copies: the copies of its blocks into the pool that were started.
    """

    def __init__(self, run: Sequence[Found], started_s: float) -> None:
        self.run = run
        self.started_s = started_s
        self.futures: list[Future[list[LoadedBlock | Miss]]] = []
        self.blocks: dict[bytes, LoadedBlock] = {}
        self.requests: set[Request] = set()
        self.copies: list[Copy] = []
        self._open = set(self.stores)

    @property
    def stores(self) -> list[str]:
        """Names of the stores that have some of the blocks, in the order of the run."""
        return list(dict.fromkeys(each.shelf for each in self.run))

    @property
    def is_ended(self) -> bool:
        """Whether nothing more comes."""
        return not self._open

    def keys_of(self, store: str) -> list[bytes]:
        """List the keys of the blocks that a store has."""
        return [each.block.key for each in self.run if each.shelf == store]

    def wanted_of(self, tier: Tier) -> list[Wanted]:
        """List the blocks that a store has, as it is asked for them."""
        cipher = tier.cipher_of(self.run[0].block.namespace.tenant)
        blocks = (each.block for each in self.run if each.shelf == tier.name)
        return [Wanted(block.key, block.tokens, cipher=cipher) for block in blocks]

    def end_call(self, store: str, outcome: LoadedBlocks) -> None:
        """Take what a call brought."""
        self._open.discard(store)
        self.blocks.update(outcome.blocks)

    def num_there(self, run: Sequence[Found]) -> int:
        """Count the blocks of a run that have come, up to the first that has not."""
        missing = (index for index, each in enumerate(run) if each.block.key not in self.blocks)
        return next(missing, len(run))

    def cancel(self) -> None:
        """Start no call that waits for its turn."""
        for future in self.futures:
            future.cancel()

    def release(self) -> None:
        """Give back what stores lent."""
        for block in self.blocks.values():
            block.loan.release()
        self.blocks.clear()
