"""The bytes of layers in the payload of a block, compared with the tensors of the pool."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from radixkv.errors import InvalidRequest
from radixkv.kernels.quantization import INT4
from radixkv.offload.block_mover import BlockMover
from radixkv.storage.layer_bytes import LayerBytes, Layers
from tests.offload.test_block_mover import pool_of


@pytest.mark.parametrize(
    ("dtype", "is_latent"),
    [*itertools.product([torch.float32, torch.bfloat16, torch.int8], [False, True]), (INT4, False)],
)
def test_layers_of_a_payload_are_those_of_the_pool(dtype: torch.dtype, is_latent: bool) -> None:
    pool = pool_of(dtype, is_latent=is_latent)
    layers = LayerBytes.of(pool)
    (payload,) = BlockMover([pool]).read([3]).payloads
    assert layers.size_of(pool.num_layers) == len(payload)
    for layer in range(pool.num_layers):
        expected = bytes(pool.values[3, layer].contiguous().view(torch.uint8).numpy())
        if pool.scales is not None:
            expected += bytes(np.ascontiguousarray(pool.scales[3, layer].numpy()))
        layer_bytes = layers.cut(payload, Layers(layer, 1))
        assert bytes(layer_bytes) == expected
        assert len(layer_bytes) == layers.size_of(1)
        assert layer_bytes.obj is not payload.obj, "a copy, so that the other layers need not stay in memory"
    assert layers.cut(payload, layers.range_of(0, 0)) is payload


def test_a_pool_without_layers_has_payloads_of_no_bytes() -> None:
    assert LayerBytes.of(pool_of(torch.float32, num_layers=0)).num_layers == 0


def test_a_range_of_layers_that_does_not_exist_is_refused_with_the_name_of_its_field() -> None:
    layers = LayerBytes(4, 10, 0)
    assert layers.range_of(0, 0) == (0, 4)
    assert layers.range_of(1, 0) == layers.range_of(1, 3) == (1, 3)
    assert layers.range_of(3, 1) == (3, 1)
    with pytest.raises(InvalidRequest, match=r"^first_layer: expected at most 3, the last one, got 4$"):
        layers.range_of(4, 1)
    with pytest.raises(InvalidRequest, match=r"^num_layers: expected at most 2 from layer 2 on, got 3$"):
        layers.range_of(2, 3)
