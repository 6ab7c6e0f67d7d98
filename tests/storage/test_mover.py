from __future__ import annotations

import pytest
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4
from radixkv.storage.mover import BlockMover, payload_layout


def pool_of(dtype: torch.dtype, *, is_by_layer: bool = False, is_latent: bool = False) -> KVPool:
    size = {"num_layers": 2, "num_kv_heads": 3, "block_size": 4, "head_dim": 6}
    pool = KVPool.allocate(5, **size, dtype=dtype, is_by_layer=is_by_layer, is_latent=is_latent)
    pool.blocks.copy_(torch.randint(0, 256, pool.blocks.shape, dtype=torch.uint8))
    return pool


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("is_by_layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4])
def test_blocks_come_back_as_they_were(dtype: torch.dtype, is_by_layer: bool, is_latent: bool) -> None:
    pool = pool_of(dtype, is_by_layer=is_by_layer, is_latent=is_latent)
    mover = BlockMover(pool)
    before = pool.blocks.clone()
    payloads = mover.read([3, 1])
    assert [len(each) for each in payloads] == [mover.payload_bytes] * 2
    pool.blocks.zero_()
    mover.write([1, 4], [payload.toreadonly() for payload in payloads])
    assert torch.equal(pool.blocks[1], before[3])
    assert torch.equal(pool.blocks[4], before[1])
    assert not pool.blocks[[0, 2, 3]].any()


def test_a_payload_is_a_copy() -> None:
    pool = pool_of(torch.float32)
    (payload,) = BlockMover(pool).read([2])
    before = bytes(payload)
    pool.blocks.zero_()
    assert bytes(payload) == before


def test_both_orders_of_a_pool_make_the_same_payload() -> None:
    by_block, by_layer = pool_of(torch.float32), pool_of(torch.float32, is_by_layer=True)
    by_layer.values.copy_(by_block.values)
    assert [bytes(each) for each in BlockMover(by_block).read([0, 4])] == [
        bytes(each) for each in BlockMover(by_layer).read([0, 4])
    ]


def test_payloads_of_pools_that_store_otherwise_have_other_layouts() -> None:
    pairs, latents = (pool_of(torch.float32, is_latent=is_latent) for is_latent in (False, True))
    assert BlockMover(pairs).payload_bytes == 2 * BlockMover(latents).payload_bytes
    assert len({payload_layout(pool) for pool in (pairs, latents, pool_of(torch.int4))}) == 3
