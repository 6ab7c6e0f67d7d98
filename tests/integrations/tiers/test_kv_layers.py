"""Copies of blocks between the K/V tensors of an engine and bytes."""

from __future__ import annotations

import pytest
import torch

from radixkv.errors import UnsupportedModel
from radixkv.integrations.tiers.kv_layers import KVLayers


def strided(num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `[num_blocks, 2, 5, 6]` whose blocks are not contiguous."""
    return torch.randn(2, num_blocks, 5, 6).to(dtype).transpose(0, 1)


def layers(num_blocks: int) -> dict[str, torch.Tensor]:
    shared = torch.randn(num_blocks, 4, 8)
    return {
        "a": strided(num_blocks, torch.bfloat16),
        "b": torch.randn(2 * num_blocks, 3),  # two rows per block
        "c": shared,
        "d": shared,
    }


def test_blocks_that_were_read_can_be_written_elsewhere() -> None:
    source, target = layers(10), layers(10)
    before = {name: layer.clone() for name, layer in target.items()}
    read, written = KVLayers(source, 10), KVLayers(target, 10)
    assert read.payload_bytes == written.payload_bytes == 2 * 5 * 6 * 2 + 2 * 3 * 4 + 4 * 8 * 4
    assert read.layout == written.layout
    values = read.read([3, 9, 0])
    assert values.shape == (3, read.payload_bytes)
    written.write([1, 2, 7], values)
    for name in ("a", "c", "d"):
        assert torch.equal(target[name][[1, 2, 7]], source[name][[3, 9, 0]])
        kept = [0, 3, 4, 5, 6, 8, 9]
        assert torch.equal(target[name][kept], before[name][kept])
    rows = lambda ids: [row for each in ids for row in (2 * each, 2 * each + 1)]  # noqa: E731
    assert torch.equal(target["b"][rows([1, 2, 7])], source["b"][rows([3, 9, 0])])


def test_other_shapes_and_dtypes_have_another_layout() -> None:
    layouts = {KVLayers({"a": torch.zeros(4, 8)}, 4).layout, KVLayers({"a": torch.zeros(4, 2, 4)}, 4).layout}
    layouts |= {KVLayers({"b": torch.zeros(4, 8)}, 4).layout, KVLayers({"a": torch.zeros(4, 8).half()}, 4).layout}
    assert len(layouts) == 4


def test_other_states_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="layer mamba: expected a tensor"):
        KVLayers({"mamba": [torch.zeros(4, 8)]}, 4)  # type: ignore[dict-item]
    with pytest.raises(UnsupportedModel, match="layer odd"):
        KVLayers({"odd": torch.zeros(5, 8)}, 4)
