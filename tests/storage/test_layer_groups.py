import pytest
import torch

from radixkv.storage.device_pool import KVHeads, KVShape, KVStorage
from radixkv.storage.layer_groups import LayerGroups


@pytest.mark.parametrize(
    ("windows", "max_tokens", "num_windowed", "window"),
    [
        ((None, None), 4096, 0, 0),
        ((512, None, 512), 4096, 2, 512),
        ((512, 1024), 4096, 2, 1024),
        ((4096, 4096), 4096, 0, 0),
        ((4096, 512), 4096, 1, 512),
        ((4096,), None, 1, 4096),
    ],
)
def test_layers_with_a_window_below_the_longest_sequence_are_windowed(
    windows: tuple[int | None, ...], max_tokens: int | None, num_windowed: int, window: int
) -> None:
    groups = LayerGroups.of(windows, max_tokens)
    assert groups.num_windowed == num_windowed
    assert groups.window == window


@pytest.mark.parametrize("windows", [(8, None, 8), (8, 8, 8)], ids=["some layers", "all layers"])
@pytest.mark.parametrize("is_by_layer", [False, True])
def test_windowed_layers_have_a_pool_of_parts_and_other_layers_a_pool_of_blocks(
    windows: tuple[int | None, ...], is_by_layer: bool
) -> None:
    groups = LayerGroups.of(windows, None)
    shape = KVShape(3, 2, 8, torch.bfloat16)
    storage = KVStorage(10, 16, shape, torch.device("cpu"), is_by_layer=is_by_layer, groups=groups, num_parts=4)
    (part_pool,) = storage.part_pools
    assert (storage.pool.num_layers, part_pool.num_layers) == (3 - groups.num_windowed, groups.num_windowed)
    assert [location.pool for location in storage.layer_locations] == [int(window is not None) for window in windows]
    assert storage.block_bytes + storage.part_bytes == 16 * shape.token_bytes
    assert storage.num_bytes == storage.pool.blocks.nbytes + part_pool.blocks.nbytes


def test_layers_are_numbered_separately_in_each_pool() -> None:
    """A location is the index of the pool, and the index of the layer in this pool."""
    groups = LayerGroups.of((8, None, 8, None, None), None)
    storage = KVStorage(2, 16, KVShape(5, 2, 8, torch.bfloat16), torch.device("cpu"), groups=groups, num_parts=1)
    assert storage.layer_locations == ((1, 0), (0, 0), (1, 1), (0, 1), (0, 2))


@pytest.mark.parametrize("is_by_layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_layers_of_each_shape_have_a_pool_of_blocks_and_a_pool_of_parts(dtype: torch.dtype, is_by_layer: bool) -> None:
    small = KVHeads(2, 8)
    large = KVHeads(1, 24)
    shape = KVShape.of_layers([small, large, small, large, large], dtype)
    groups = LayerGroups.of((8, None, None, 8, None), None)
    cpu = torch.device("cpu")
    divided = KVStorage(10, 16, shape, cpu, is_by_layer=is_by_layer, groups=groups, num_parts=4)
    assert [(pool.num_layers, pool.num_kv_heads, pool.head_dim) for pool in divided.pools] == [(1, 2, 8), (2, 1, 24)]
    assert [(pool.num_layers, pool.num_kv_heads) for pool in divided.part_pools] == [(1, 2), (1, 1)]
    assert divided.layer_locations == ((2, 0), (1, 0), (0, 0), (3, 0), (1, 1))
    whole = KVStorage(10, 16, shape, cpu, is_by_layer=is_by_layer)
    assert whole.layer_locations == ((0, 0), (1, 0), (0, 1), (1, 1), (1, 2))
    assert whole.block_bytes == divided.block_bytes + divided.part_bytes == 16 * shape.token_bytes
    for storage in (whole, divided):
        assert storage.num_bytes == sum(pool.blocks.nbytes for pool in (*storage.pools, *storage.part_pools))
