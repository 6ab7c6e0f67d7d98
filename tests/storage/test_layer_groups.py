import pytest
import torch

from radixkv.storage.device_pool import KVShape, KVStorage
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
def test_layers_whose_window_hides_something_are_windowed(
    windows: tuple[int | None, ...], max_tokens: int | None, num_windowed: int, window: int
) -> None:
    groups = LayerGroups.of(windows, max_tokens)
    assert (groups.num_windowed, groups.num_whole) == (num_windowed, len(windows) - num_windowed)
    assert groups.window == window


def test_layers_count_by_themselves_in_each_pool() -> None:
    places = LayerGroups.of((8, None, 8, None, None), None).places
    assert [(place.is_windowed, place.layer) for place in places] == [
        (True, 0),
        (False, 0),
        (True, 1),
        (False, 1),
        (False, 2),
    ]


@pytest.mark.parametrize("windows", [(8, None, 8), (8, 8, 8)], ids=["some layers", "all layers"])
@pytest.mark.parametrize("is_by_layer", [False, True])
def test_each_pool_has_its_layers(windows: tuple[int | None, ...], is_by_layer: bool) -> None:
    groups = LayerGroups.of(windows, None)
    shape = KVShape(3, 2, 8, torch.bfloat16)
    storage = KVStorage(10, 16, shape, torch.device("cpu"), is_by_layer=is_by_layer, groups=groups, num_parts=4)
    assert storage.parts is not None
    assert (storage.pool.num_layers, storage.parts.num_layers) == (groups.num_whole, groups.num_windowed)
    assert storage.block_bytes + storage.part_bytes == 16 * shape.token_bytes
    assert storage.num_bytes == storage.pool.blocks.nbytes + storage.parts.blocks.nbytes
