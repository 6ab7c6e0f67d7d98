"""Stores that several servers share, from which blocks are loaded by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.tiers.block_object import Wanted
from radixkv.offload.tiers.tier import LoadedBlock, Miss, Tier


class SharedStores:
    """Returns which shared stores have blocks, and loads blocks from them, verified.

    Args:
        tiers: the shared stores, by name.
        is_purging_any: returns, on the engine's thread, whether a store may still hold purged blocks of an owner of any
            of the given blocks.
    """

    def __init__(self, tiers: Mapping[str, Tier], is_purging_any: Callable[[str, Sequence[KeyedBlock]], bool]) -> None:
        self._tiers = tiers
        self._is_purging_any = is_purging_any

    def names(self) -> list[str]:
        """List the stores that work. May be called from any thread."""
        return [name for name, tier in self._tiers.items() if tier.is_working()]

    def names_for(self, blocks: Sequence[KeyedBlock]) -> list[str]:
        """List the working stores without purged blocks of an owner of the given ones. Only for the engine's thread."""
        return [name for name in self.names() if not self._is_purging_any(name, blocks)]

    def exists(self, name: str, blocks: Sequence[KeyedBlock]) -> Future[list[bool] | None]:
        """Return whether a store has each block; None if it can't be reached. May be called from any thread."""
        return self._tiers[name].exists([block.key for block in blocks])

    def load(self, name: str, blocks: Sequence[KeyedBlock]) -> Future[list[LoadedBlock | Miss]]:
        """Load blocks, and verify them. May be called from any thread."""
        tier = self._tiers[name]
        return tier.load([Wanted(each.key, each.tokens, tier.protection_of(each.namespace.tenant)) for each in blocks])

    def copy_of(self, block: LoadedBlock | Miss) -> memoryview | None:
        """Return a copy of a loaded block, and release its buffer; None if the block was not loaded."""
        if not isinstance(block, LoadedBlock):
            return None
        with block.loan:
            return memoryview(bytes(block.payload))
