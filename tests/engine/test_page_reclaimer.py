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

SIZE, STEP_TOKENS, NUM_WHOLE = 16, 64, 200
REACH = Reach.of_window(32)


def test_blocks_and_parts_stay_within_the_memory_that_they_share() -> None:
    own = min_parts(REACH, SIZE, STEP_TOKENS)
    num_blocks = NUM_WHOLE * 3 - own * 2
    groups = LayerGroups((True, True, False), 32)
    shape = KVShape(3, 2, 64, torch.float32)
    storage = KVStorage(
        num_blocks,
        SIZE,
        shape,
        torch.device("cpu"),
        is_by_layer=True,
        groups=groups,
        num_parts=NUM_WHOLE,
        num_dedicated_parts=own,
    )
    memory = PartMemory(storage.part_bytes, storage.block_bytes, own)
    parts = WindowPool(num_blocks, NUM_WHOLE, SIZE, REACH, STEP_TOKENS, memory)
    cache = PrefixCache(num_blocks, SIZE, windows=WindowedLayers([parts]))
    reclaimer = PageReclaimer(storage, cache.pool, parts)
    dice, most_bytes = np.random.default_rng(1), 0
    for _ in range(100):
        prompt = dice.integers(0, 1_000_000, int(dice.integers(50, 1500))).astype("<u4").tobytes()
        with cache.lease(Namespace("model"), prompt) as lease:
            start = lease.cached_tokens
            lease.copy = None
            while start < lease.num_tokens:
                end = min(start + STEP_TOKENS, lease.num_tokens)
                for holder in lease.windows:
                    part_ids = holder.cover(lease.block_ids, start, end).part_ids
                    first, last = start // SIZE, -(-end // SIZE)
                    for at in range(first, last):
                        storage.pools[0].values[int(lease.block_ids[at])] = float(lease.block_ids[at])
                        storage.part_pools[0].values[int(part_ids[at])] = float(lease.block_ids[at])
                    holder.settle(end)
                reclaimer.step_done(0.0, 1, end - start, 0)
                most_bytes = max(most_bytes, reclaimer.num_bytes)
                lease.commit(end)
                start = end
    assert most_bytes <= storage.num_bytes * (1 + 1 / 64)
    assert storage.num_blocks * storage.block_bytes + storage.num_parts * storage.part_bytes > 1.2 * storage.num_bytes
    for block_id in np.flatnonzero(parts.table >= 0).tolist():
        assert (storage.pools[0].values[block_id] == block_id).all(), "a block in use lost its memory"
        assert (storage.part_pools[0].values[int(parts.table[block_id])] == block_id).all()
