import pytest
import torch

from radixkv.compute.compression.entries import copy_entries, move_entries
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, INT4]
LAYERS, HEADS, SIZE, DIM = 3, 2, 4, 8


def filled_pool(dtype: torch.dtype, *, is_by_layer: bool) -> KVPool:
    pool = KVPool.allocate(6, LAYERS, HEADS, SIZE, DIM, dtype=dtype, is_by_layer=is_by_layer)
    pool.blocks.copy_(torch.randint(0, 64, pool.blocks.shape, generator=torch.Generator().manual_seed(0)))
    return pool


def entry(pool: KVPool, block_ids: torch.Tensor, layer: int, head: int, place: int) -> bytes:
    where = (int(block_ids[place // SIZE]), layer, slice(None), head, place % SIZE)
    stored = [pool.values[where]] + ([] if pool.scales is None else [pool.scales[where]])
    return b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in stored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_by_layer", [False, True])
def test_chosen_entries_are_copied_as_they_are_stored(dtype: torch.dtype, is_by_layer: bool) -> None:
    pool = filled_pool(dtype, is_by_layer=is_by_layer)
    sources, targets = torch.tensor([4, 0, 2]), torch.tensor([5, 1])
    chosen = torch.stack([torch.randperm(12)[:7].sort().values for _ in range(LAYERS * HEADS)]).view(LAYERS, HEADS, 7)
    before = pool.blocks.clone()
    copy_entries(pool, chosen, sources, targets)
    for layer in range(LAYERS):
        for head in range(HEADS):
            for place in range(7):
                expected = entry(pool, sources, layer, head, int(chosen[layer, head, place]))
                assert entry(pool, targets, layer, head, place) == expected
    others = [0, 2, 3, 4]
    assert torch.equal(pool.blocks[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_takes_the_place_of_another_one_in_each_head(dtype: torch.dtype) -> None:
    pool = filled_pool(dtype, is_by_layer=True)
    block_ids, targets = torch.tensor([3, 1]), torch.tensor([[0, 6], [3, 1], [6, 5]])
    held = {
        (layer, head, place): entry(pool, block_ids, layer, head, place)
        for layer in range(LAYERS)
        for head in range(HEADS)
        for place in range(8)
    }
    move_entries(pool, block_ids, 6, targets)
    for (layer, head, place), stored in held.items():
        moved = held[layer, head, 6] if place == targets[layer, head] else stored
        assert entry(pool, block_ids, layer, head, place) == moved
