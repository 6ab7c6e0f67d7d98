"""The blocks of a `PrefixStore` in host memory and on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from radixkv.errors import ConfigError
from radixkv.integrations.tiers.byte_store import ByteStore, store_keys
from radixkv.integrations.tiers.options import TierOptions
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.index.prompt_blocks import KeyedBlock

# K/V that are staged for one load, so that a long prompt does not double its memory.
_STAGED_BYTES = 64 << 20
_PURGE_LIMIT_S = 60.0


def require_local(options: TierOptions) -> None:
    """Refuse stores that other processes share, of which `clear` could not know all blocks.

    Raises:
        ConfigError: there is such a store, or the weights are named.
    """
    if options.tiers.redis_url:
        raise ConfigError("redis_url: RadixCache has tiers in host memory and on a disk only, got redis_url")
    if options.model_id:
        raise ConfigError("model_id: RadixCache identifies a model by its weights, got a model_id")


class BlockTiers:
    """Saves whole blocks of prompts, and loads those that the cache does not have. Thread-safe.

    Args:
        options: the tiers.
        block_format: format of the blocks.

    Raises:
        ConfigError: an option is invalid, or a tier has no room for one block.
    """

    def __init__(self, options: TierOptions, block_format: BlockFormat) -> None:
        self._keys = store_keys(options, block_format)
        self._store = ByteStore(options, block_format, self._keys)
        self._num_staged = max(1, _STAGED_BYTES // block_format.payload_bytes)

    def load(self, namespace: Namespace, tokens: bytes, first: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Load the blocks of a prompt from block `first` on, up to the first one that no tier has.

        Yields:
            The index of a block in the prompt, and the payloads from this block on, uint8 `[n, payload_bytes]`.

        Complexity: about 2 us per block of the prompt, and the time of the loads.
        """
        wanted = list(self._keys.blocks(namespace, tokens))[first:]
        held = list(takewhile(lambda block: self._store.holds(block.key), wanted))
        for start in range(0, len(held), self._num_staged):
            part = held[start : start + self._num_staged]
            payloads = np.empty((len(part), self._keys.format.payload_bytes), np.uint8)
            buffers = [(block, row.data) for block, row in zip(part, payloads, strict=True)]
            loaded = self._store.load_into(buffers).result()
            num_loaded = loaded.index(False) if False in loaded else len(loaded)
            if num_loaded:
                yield first + start, payloads[:num_loaded]
            if num_loaded < len(part):
                return

    def unsaved(self, namespace: Namespace, tokens: bytes, first: int) -> list[tuple[int, KeyedBlock]]:
        """Mark the blocks of a prompt as used, from block `first` on.

        Returns:
            Index and key of those that must be saved. Complexity: about 2 us per block of the prompt.
        """
        blocks = list(enumerate(self._keys.blocks(namespace, tokens)))[first:]
        is_saved = reversed(self._store.touch([block.key for _, block in reversed(blocks)]))
        return [pair for pair, is_everywhere in zip(blocks, is_saved, strict=True) if not is_everywhere]

    def save(self, blocks: Sequence[KeyedBlock], payloads: npt.NDArray[np.uint8]) -> None:
        """Save blocks, without waiting.

        Args:
            blocks: consecutive blocks of a prompt.
            payloads: uint8 `[len(blocks), payload_bytes]`, which must not change any more.
        """
        self._store.save([(block, row.data) for block, row in zip(blocks, payloads, strict=True)])
        self._store.touch([block.key for block in reversed(blocks)])  # the end of a prompt is evicted first

    def purge(self, tenant: str | None, salt: str | None) -> None:
        """Delete the blocks that were computed under these names, and wait for it; None matches any name.

        Raises:
            StoreError: see `ByteStore.purge`.
        """
        self._store.purge(self._keys.scope(tenant, None, salt), _PURGE_LIMIT_S)

    def counts(self) -> dict[str, int]:
        """Return what was saved, loaded and missed; see `ByteStore.counts`."""
        return self._store.counts()

    def close(self) -> None:
        """Write what is waiting, and close the stores."""
        self._store.close()
