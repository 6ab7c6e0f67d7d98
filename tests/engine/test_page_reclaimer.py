"""Blocks and parts of windowed layers share memory: they use no more than there is, and keep their contents."""

import numpy as np
import torch

from radixkv.cache.part_memory import PartMemory
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.window_pool import Reach, WindowPool, min_parts
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.engine.page_reclaimer import PageReclaimer
from radixkv.namespace import Namespace
from radixkv.storage.device_pool import KVShape, KVStorage
from radixkv.storage.layer_groups import LayerGroups

BLOCK_SIZE, STEP_TOKENS = 16, 64
NUM_PARTS = 200  # the memory has room for as many blocks of all three layers, of which two are windowed
REACH = Reach.of_window(32)


def test_blocks_and_parts_stay_within_the_memory_that_they_share() -> None:
    num_dedicated_parts = min_parts(REACH, BLOCK_SIZE, STEP_TOKENS)
    num_blocks = NUM_PARTS * 3 - num_dedicated_parts * 2  # a block has one layer, and a part has two
    groups = LayerGroups((True, True, False), 32)
    shape = KVShape(3, 2, 64, torch.float32)
    storage = KVStorage(
        num_blocks,
        BLOCK_SIZE,
        shape,
        torch.device("cpu"),
        is_by_layer=True,
        groups=groups,
        num_parts=NUM_PARTS,
        num_dedicated_parts=num_dedicated_parts,
    )
    memory = PartMemory(storage.part_bytes, storage.block_bytes, num_dedicated_parts)
    parts = WindowPool(num_blocks, NUM_PARTS, BLOCK_SIZE, REACH, STEP_TOKENS, memory)
    cache = PrefixCache(num_blocks, BLOCK_SIZE, windows=WindowedLayers([parts]))
    reclaimer = PageReclaimer(storage, cache.pool, parts)
    rng, max_bytes = np.random.default_rng(1), 0
    for _ in range(100):
        prompt = rng.integers(0, 1_000_000, int(rng.integers(50, 1500))).astype("<u4").tobytes()
        with cache.lease(Namespace("model"), prompt) as lease:
            start = lease.cached_tokens
            lease.copy = None
            while start < lease.num_tokens:
                end = min(start + STEP_TOKENS, lease.num_tokens)
                for window in lease.windows:
                    part_ids = window.cover(lease.block_ids, start, end).part_ids
                    first, last = start // BLOCK_SIZE, -(-end // BLOCK_SIZE)
                    for index in range(first, last):
                        storage.pools[0].values[int(lease.block_ids[index])] = float(lease.block_ids[index])
                        storage.part_pools[0].values[int(part_ids[index])] = float(lease.block_ids[index])
                    window.settle(end)
                reclaimer.step_done(0.0, 1, end - start, 0)
                max_bytes = max(max_bytes, reclaimer.num_bytes)
                lease.commit(end)
                start = end
    assert max_bytes <= storage.num_bytes * (1 + 1 / 64)
    assert storage.num_blocks * storage.block_bytes + storage.num_parts * storage.part_bytes > 1.2 * storage.num_bytes
    for block_id in np.flatnonzero(parts.table >= 0).tolist():
        assert (storage.pools[0].values[block_id] == block_id).all(), "a cached block lost its memory"
        assert (storage.part_pools[0].values[int(parts.table[block_id])] == block_id).all()
