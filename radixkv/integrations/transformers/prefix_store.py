"""The radix tree and the K/V of its blocks, for several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from radixkv.blocks import BlockIds
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.integrations.tiers.options import TierOptions
from radixkv.integrations.transformers.block_tiers import BlockTiers
from radixkv.integrations.transformers.kv_slots import KV, KVSlots
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat
from radixkv.tokens import TOKEN_BYTES

# Returns the K/V of positions `start` to `end` by layer, `[num_kv_heads, end - start, head_dim]`.
ReadNewKV = Callable[[int, int], Mapping[int, KV]]


class PrefixStore:
    """Finds cached prefixes, and publishes new ones. Thread-safe: one lock guards everything but loads from tiers.

    A lease lasts only as long as the call that opens it, so a forward pass that fails leaves nothing to release.

    With tiers, whole blocks are also saved there when they are published, and loaded before prompts are matched.

    Args:
        num_blocks: number of blocks.
        block_size: tokens per block.
        max_sequence_tokens: maximum number of tokens of a sequence that are cached; see
            `radixkv.config.sequence_limit`.
        policy: decides which unused leaf is evicted first; None for the least recently used one.
        device: where to store K/V; None for the device that computes them.
        kv_dtype: how to store K/V, a key of `KV_DTYPES`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_sequence_tokens: int,
        policy: EvictionPolicy | None,
        device: torch.device | None,
        kv_dtype: str,
    ) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._max_tokens = min(max_sequence_tokens, num_blocks * block_size)
        self._slots = KVSlots(num_blocks, block_size, device, kv_dtype)
        self._kv_dtype = kv_dtype
        self._tiers: BlockTiers | None = None
        self._cache = PrefixCache(num_blocks, block_size, policy=policy)
        self._lock = threading.Lock()
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The number of times that the store was cleared."""
        return self._epoch

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for K/V."""
        return self._slots.num_bytes

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks evicted so far."""
        return self._cache.num_evicted_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold K/V now."""
        return self._num_blocks - self._cache.pool.num_free

    def tier_counts(self) -> dict[str, int]:
        """Return what the tiers have counted since they were opened; see `ByteStore.counts`."""
        return {} if self._tiers is None else self._tiers.counts()

    def open_tiers(self, options: TierOptions, model: str, computed_by: str, kv: Mapping[int, KV]) -> None:
        """Open tiers for a model, and allocate the memory of its K/V.

        Args:
            options: the tiers.
            model: digest of the model.
            computed_by: what else the bits of K/V depend on; see `describe_computation`.
            kv: K/V of any tokens, with the shapes, dtypes and devices of those of the model.

        Raises:
            ConfigError: see `BlockTiers`.
        """
        with self._lock:
            self._slots.allocate(kv)
            dtypes = sorted({str(each.dtype) for pair in kv.values() for each in pair})
            block_format = BlockFormat(
                model=model,
                dtype=", ".join(dtypes),
                kv_dtype=self._kv_dtype,
                layout=self._slots.layout,
                block_size=self.block_size,
                payload_bytes=self._slots.block_bytes,
                computed_by=computed_by,
            )
            self._tiers = BlockTiers(options, block_format)

    def close_tiers(self) -> None:
        """Write what is waiting, and close the tiers. Without tiers, this does nothing."""
        with self._lock:
            tiers, self._tiers = self._tiers, None
        if tiers is not None:
            tiers.close()

    @contextmanager
    def match(self, namespace: Namespace, prompts: Sequence[bytes]) -> Iterator[list[MatchedPrefix]]:
        """Find the cached prefixes of prompts. The context holds the lock, so that the prefixes can be read in it."""
        tiers = self._tiers
        if tiers is not None:
            for tokens in prompts:
                self._load(tiers, namespace, tokens[: self._max_tokens * TOKEN_BYTES])
        with self._lock:
            matches = [self._cache.match(namespace, tokens) for tokens in prompts]
            yield [MatchedPrefix(self._slots, each.block_ids, each.cached_tokens) for each in matches]

    def publish(
        self,
        namespace: Namespace,
        tokens: bytes,
        num_published: int,
        first: int,
        read_kv: ReadNewKV,
        epoch: int,
        saved_keys: list[bytes],
    ) -> None:
        """Copy the K/V of a sequence that are not cached yet into blocks, so that other prompts can reuse them.

        Tokens beyond `max_sequence_tokens` or the size of the store are left out. Nothing is published if some K/V are
        not finite, if the store was cleared since `epoch`, or if blocks before `first` were evicted.

        Args:
            namespace, tokens: the sequence.
            num_published: tokens of the sequence that were published before. Finding them does not count as reuse.
            first: the first position whose K/V `read_kv` can return.
            read_kv: returns the K/V of a range of positions.
            epoch: the epoch in which the sequence was matched.
            saved_keys: keys of the first blocks of the sequence, which earlier calls passed to the tiers. Those of the
                blocks that this call passes to the tiers are appended.
        """
        tokens = tokens[: self._max_tokens * TOKEN_BYTES]
        if len(tokens) <= num_published * TOKEN_BYTES:
            return
        with self._lock, torch.no_grad():
            if epoch != self._epoch:
                return
            with self._cache.lease(namespace, tokens, is_resumed=num_published > 0) as lease:
                start, end = lease.cached_tokens, lease.num_tokens
                if start < first:
                    return
                new_kv = read_kv(start, end)
                if not _are_finite(new_kv):
                    return
                if lease.copy is not None:  # the first of these tokens are in a block that other sequences use
                    self._slots.copy(lease.copy)
                    lease.copy = None
                self._slots.write(lease.block_ids, start, end, new_kv)
                if self._tiers is not None:
                    block_ids = lease.block_ids
                    self._tiers.save(
                        namespace,
                        tokens,
                        saved_keys,
                        lambda indexes: self._slots.read_blocks(block_ids[indexes]),
                    )
                lease.commit(end)

    def clear(self, tenant: str | None = None, salt: str | None = None) -> None:
        """Evict what is cached in namespaces with these names; None matches any. Without names, K/V memory is freed.

        Sequences that were matched before, in any namespace, are not published after this. Blocks in the tiers are
        deleted as well. K/V memory is not freed while there are tiers.

        Raises:
            StoreError: see `ByteStore.purge`.
        """
        with self._lock:
            self._epoch += 1
            self._cache.purge(tenant=tenant, salt=salt)
            if self._tiers is not None:
                self._tiers.purge(tenant, salt)
            elif tenant is None and salt is None:
                self._slots.free()

    def _load(self, tiers: BlockTiers, namespace: Namespace, tokens: bytes) -> None:
        """Load the blocks of a prompt that only the tiers have. The lock is not held while the tiers are read."""
        block_size = self.block_size
        with self._lock:
            epoch = self._epoch
            num_cached_tokens = self._cache.num_found_tokens(namespace, tokens)
        if num_cached_tokens == len(tokens) // TOKEN_BYTES - 1:
            return  # all tokens are cached but the last one, which is always computed
        for first_block, payloads in tiers.load(namespace, tokens, num_cached_tokens // block_size):
            end = (first_block + len(payloads)) * block_size
            with self._lock, torch.no_grad():
                if epoch != self._epoch:
                    return
                with self._cache.lease(namespace, tokens[: end * TOKEN_BYTES], is_resumed=True) as lease:
                    num_cached_blocks = lease.cached_tokens // block_size
                    if num_cached_blocks < first_block:  # blocks before the loaded ones were evicted meanwhile
                        return
                    lease.copy = None  # the whole block is overwritten
                    self._slots.write_blocks(
                        lease.block_ids[num_cached_blocks:], payloads[num_cached_blocks - first_block :]
                    )
                    lease.commit(end)


def _are_finite(kv: Mapping[int, KV]) -> bool:
    """Whether K/V have no NaN and no infinity. The result is read from the device once for all layers."""
    are_finite = [tensor.isfinite().all() for pair in kv.values() for tensor in pair]
    return bool(torch.stack([each.to(are_finite[0].device) for each in are_finite]).all())


class MatchedPrefix:
    """The cached prefix of one prompt.

    Args:
        slots: K/V of all blocks.
        block_ids: the blocks of the prefix, int32.
        num_tokens: length of the prefix.
    """

    def __init__(self, slots: KVSlots, block_ids: BlockIds, num_tokens: int) -> None:
        self._slots = slots
        self._block_ids = block_ids
        self.num_tokens = num_tokens

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that have K/V."""
        return self._slots.layer_ids

    def read(self, layer_id: int, start: int, end: int) -> KV:
        """Copy the K/V of a range of positions; see `KVSlots.read`."""
        return self._slots.read(layer_id, self._block_ids, start, end)
