"""The blocks of a `PrefixStore` in host memory and on a disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

import numpy as np
import numpy.typing as npt

from radixkv.errors import ConfigError
from radixkv.integrations.tiers.byte_store import ByteStore, store_keys
from radixkv.integrations.tiers.options import TierOptions
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat, PromptKeys
from radixkv.tokens import TOKEN_BYTES

_log = logging.getLogger(__name__)

# Bytes of K/V that are copied at a time, so that a long prompt does not take twice its memory.
_STAGED_BYTES = 64 << 20
_PURGE_LIMIT_S = 60.0


def require_local(options: TierOptions) -> None:
    """Refuse stores that several processes share, since `clear` could not delete what other processes have saved.

    Raises:
        ConfigError: there is such a store, or `model_id` is set.
    """
    if options.tiers.redis_url:
        raise ConfigError("redis_url: RadixCache has tiers in host memory and on a disk only, got redis_url")
    if options.model_id:
        raise ConfigError("model_id: RadixCache identifies a model by its weights, got a model_id")


class BlockTiers:
    """Saves whole blocks of prompts, and loads blocks that the cache does not have. Thread-safe.

    Args:
        options: the tiers.
        block_format: format of the blocks.

    Raises:
        ConfigError: an option is invalid, or a tier is too small for one block.
    """

    def __init__(self, options: TierOptions, block_format: BlockFormat) -> None:
        self._keys = store_keys(options, block_format)
        self._prompt_keys = PromptKeys(self._keys, InvocationMarks())  # transformers has no invoked adapters
        self._store = ByteStore(options, block_format, self._keys)
        self._max_staged_blocks = max(1, _STAGED_BYTES // block_format.payload_bytes)

    def load(self, namespace: Namespace, tokens: bytes, first: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Load the blocks of a prompt from block `first` on, up to the first one that no tier has.

        Yields:
            The index of a block in the prompt, and the payloads of `n` blocks from this one on, uint8
            `[n, payload_bytes]`.

        Complexity: about 2 us for each block up to the last one that is loaded, and the time of the loads.
        """
        wanted = islice(self._prompt_keys.blocks(namespace, tokens), first, None)
        held_blocks = list(takewhile(lambda block: self._store.holds(block.key), wanted))
        for start in range(0, len(held_blocks), self._max_staged_blocks):
            staged = held_blocks[start : start + self._max_staged_blocks]
            payloads = np.empty((len(staged), self._keys.format.payload_bytes), np.uint8)
            buffers = [(block, row.data) for block, row in zip(staged, payloads, strict=True)]
            loaded = self._store.load_into(buffers).result()
            num_loaded = loaded.index(False) if False in loaded else len(loaded)
            if num_loaded:
                yield first + start, payloads[:num_loaded]
            if num_loaded < len(staged):
                return

    def save(
        self,
        namespace: Namespace,
        tokens: bytes,
        keys: list[bytes],
        read: Callable[[Sequence[int]], npt.NDArray[np.uint8]],
    ) -> None:
        """Save the whole blocks of a sequence that follow the known keys, in each tier that does not hold them.

        Does not wait until the blocks are written. Blocks with known keys are only marked as used.

        Args:
            namespace, tokens: the sequence.
            keys: the keys of its first blocks, which were saved before. The keys of the other blocks are appended,
                up to the first block that there was no memory to copy.
            read: copies blocks, given their indexes in the sequence, to uint8 `[n, payload_bytes]`.

        Complexity: O(new tokens) to hash them, O(blocks) to mark the blocks as used, and the copies.
        """
        first = len(keys)  # index of the first block without a known key
        new_tokens = tokens[first * self._keys.format.block_size * TOKEN_BYTES :]
        blocks = list(self._prompt_keys.blocks(namespace, new_tokens, keys[-1] if keys else None))
        keys += [block.key for block in blocks]
        are_everywhere = self._store.touch(keys[first:])
        unsaved = [index for index, is_everywhere in enumerate(are_everywhere, first) if not is_everywhere]
        for start in range(0, len(unsaved), self._max_staged_blocks):
            staged = unsaved[start : start + self._max_staged_blocks]
            try:
                payloads = read(staged)
            except MemoryError as error:
                _log.warning("no memory to copy %d blocks for the tiers, so they are not saved: %s", len(staged), error)
                del keys[staged[0] :]  # the next call saves these blocks
                break
            self._store.save([(blocks[index - first], row.data) for index, row in zip(staged, payloads, strict=True)])
        self._store.touch(keys[::-1])  # the end of the sequence is evicted first

    def purge(self, tenant: str | None, salt: str | None) -> None:
        """Delete the blocks that were computed under these names, and wait for the deletion; None matches any name.

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
