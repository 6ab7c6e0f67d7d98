"""Copies of blocks between the K/V tensors of an engine and bytes."""

from __future__ import annotations

import pytest
import torch

from radixkv.errors import UnsupportedModel
from radixkv.integrations.tiers.kv_layers import KVLayers


def strided(num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor `[num_blocks, 2, 5, 6]` whose blocks are not contiguous."""
    return torch.randn(2, num_blocks, 5, 6).to(dtype).transpose(0, 1)


def layers(num_blocks: int) -> dict[str, torch.Tensor]:
    """Return the K/V tensors of four layers, of which the last two share one tensor."""
    shared = torch.randn(num_blocks, 4, 8)
    return {
        "a": strided(num_blocks, torch.bfloat16),
        "b": torch.randn(2 * num_blocks, 3),  # two rows per block
        "c": shared,
        "d": shared,
    }


def test_blocks_can_be_copied_to_other_blocks_of_another_engine() -> None:
    source, target = layers(10), layers(10)
    before = {name: layer.clone() for name, layer in target.items()}
    source_layers, target_layers = KVLayers(source, 10), KVLayers(target, 10)
    # Layers a and b, and the tensor of c and d once.
    assert source_layers.payload_bytes == target_layers.payload_bytes == 2 * 5 * 6 * 2 + 2 * 3 * 4 + 4 * 8 * 4
    assert source_layers.layout == target_layers.layout
    source_ids, target_ids, untouched_ids = [3, 9, 0], [1, 2, 7], [0, 3, 4, 5, 6, 8, 9]
    values = source_layers.read(source_ids)
    assert values.shape == (3, source_layers.payload_bytes)
    target_layers.write(target_ids, values)
    for name in ("a", "c", "d"):
        assert torch.equal(target[name][target_ids], source[name][source_ids])
        assert torch.equal(target[name][untouched_ids], before[name][untouched_ids])
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        source_rows = source["b"][2 * source_id : 2 * source_id + 2]
        assert torch.equal(target["b"][2 * target_id : 2 * target_id + 2], source_rows)


def test_other_shapes_and_dtypes_have_another_layout() -> None:
    layouts = {KVLayers({"a": torch.zeros(4, 8)}, 4).layout, KVLayers({"a": torch.zeros(4, 2, 4)}, 4).layout}
    layouts |= {KVLayers({"b": torch.zeros(4, 8)}, 4).layout, KVLayers({"a": torch.zeros(4, 8).half()}, 4).layout}
    assert len(layouts) == 4


def test_layers_that_are_not_tensors_of_whole_blocks_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="layer mamba: expected a tensor"):
        KVLayers({"mamba": [torch.zeros(4, 8)]}, 4)  # type: ignore[dict-item]
    with pytest.raises(UnsupportedModel, match="layer odd"):
        KVLayers({"odd": torch.zeros(5, 8)}, 4)
