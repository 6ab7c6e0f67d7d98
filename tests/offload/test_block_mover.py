from __future__ import annotations

import itertools

import pytest
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native import copies
from radixkv.kernels.quantization import INT4
from radixkv.offload.block_mover import BlockMover
from radixkv.storage.layer_bytes import payload_layout
from tests.offload.tiers.backends import native_or_skip


def pool_of(dtype: torch.dtype, *, is_by_layer: bool = False, is_latent: bool = False, num_layers: int = 2) -> KVPool:
    """Return a pool of five blocks with random bytes. A pool without layers is always ordered by layer."""
    size = {"num_layers": num_layers, "num_kv_heads": 3, "block_size": 4, "head_dim": 6}
    is_by_layer = is_by_layer or not num_layers
    pool = KVPool.allocate(5, **size, dtype=dtype, is_by_layer=is_by_layer, is_latent=is_latent)
    pool.blocks.copy_(torch.randint(0, 256, pool.blocks.shape, dtype=torch.uint8))
    return pool


@pytest.mark.parametrize("is_by_layer", [False, True])
@pytest.mark.parametrize(
    ("dtype", "is_latent"),
    [*itertools.product([torch.float32, torch.bfloat16, torch.int8], [False, True]), (INT4, False)],
)
def test_blocks_are_restored_bitwise(dtype: torch.dtype, is_by_layer: bool, is_latent: bool) -> None:
    pool = pool_of(dtype, is_by_layer=is_by_layer, is_latent=is_latent)
    mover = BlockMover([pool])
    before = pool.blocks.clone()
    payloads = mover.read([3, 1]).payloads
    assert [len(each) for each in payloads] == [mover.payload_bytes] * 2
    pool.blocks.zero_()
    mover.write([1, 4], [payload.toreadonly() for payload in payloads])
    assert torch.equal(pool.blocks[1], before[3])
    assert torch.equal(pool.blocks[4], before[1])
    assert not pool.blocks[[0, 2, 3]].any()


@pytest.mark.parametrize("is_by_layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("head_dim", [64, 10], ids=["whole-cache-lines", "others"])
def test_copies_in_cpp_fill_the_same_bytes(
    dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch, *, is_by_layer: bool
) -> None:
    native = native_or_skip()
    monkeypatch.setattr(copies, "MIN_FILLED_BYTES", 0)
    pool = KVPool.allocate(5, 2, 3, 3, head_dim, dtype=dtype, is_by_layer=is_by_layer)
    pool.blocks.copy_(torch.randint(0, 256, pool.blocks.shape, dtype=torch.uint8))
    before = pool.blocks.clone()
    expected = pool.blocks.clone()
    expected[1], expected[4] = before[3], before[1]
    BlockMover([pool], native=native).write([1, 4], BlockMover([pool]).read([3, 1]).payloads)
    assert torch.equal(pool.blocks, expected)


def test_a_payload_is_a_copy() -> None:
    pool = pool_of(torch.float32)
    (payload,) = BlockMover([pool]).read([2]).payloads
    before = bytes(payload)
    pool.blocks.zero_()
    assert bytes(payload) == before


def test_both_orders_of_a_pool_make_the_same_payload() -> None:
    by_block = pool_of(torch.float32)
    by_layer = pool_of(torch.float32, is_by_layer=True)
    by_layer.values.copy_(by_block.values)
    assert [bytes(each) for each in BlockMover([by_block]).read([0, 4]).payloads] == [
        bytes(each) for each in BlockMover([by_layer]).read([0, 4]).payloads
    ]


def test_payloads_of_different_formats_have_different_layouts() -> None:
    pairs, latents = (pool_of(torch.float32, is_latent=is_latent) for is_latent in (False, True))
    assert BlockMover([pairs]).payload_bytes == 2 * BlockMover([latents]).payload_bytes
    assert len({payload_layout([pool]) for pool in (pairs, latents, pool_of(torch.int4))}) == 3


@pytest.mark.parametrize("num_full_layers", [0, 2])
@pytest.mark.parametrize("is_by_layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_block_is_restored_with_its_part_or_without(
    dtype: torch.dtype, is_by_layer: bool, num_full_layers: int
) -> None:
    parts = pool_of(dtype, is_by_layer=is_by_layer)
    pool = pool_of(dtype, is_by_layer=is_by_layer, num_layers=num_full_layers)
    mover = BlockMover([pool], [parts])
    before = pool.blocks.clone()
    parts_before = parts.blocks.clone()
    first, second = mover.read([3, 1], [None, 2]).payloads
    assert (first.nbytes, second.nbytes) == (mover.block_bytes, mover.payload_bytes) == mover.sizes[::-1]
    assert (mover.has_part(first), mover.has_part(second)) == (False, True)
    pool.blocks.zero_()
    parts.blocks.zero_()
    mover.write([1, 4], [first, second])
    mover.write_parts([0], [second])
    assert torch.equal(pool.blocks[[1, 4]], before[[3, 1]])
    assert torch.equal(parts.blocks[0], parts_before[2])
    assert not parts.blocks[1:].any()


def test_a_payload_with_parts_has_another_layout() -> None:
    pool = pool_of(torch.float32)
    parts = pool_of(torch.float32)
    assert (
        payload_layout([pool], [parts])
        == f"{payload_layout([pool])}; then the same of 2 windowed layers, if they have it"
    )
    assert BlockMover([pool]).sizes == (BlockMover([pool]).payload_bytes,)
    assert BlockMover([pool]).has_part(BlockMover([pool]).read([0]).payloads[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_payload_has_the_bytes_of_pools_of_different_shapes(dtype: torch.dtype) -> None:
    pools = [pool_of(dtype), pool_of(dtype, num_layers=3)]
    parts = [pool_of(dtype), pool_of(dtype, num_layers=1)]
    mover = BlockMover(pools, parts)
    assert mover.block_bytes == sum(pool.blocks[0].nbytes for pool in pools)
    before = [pool.blocks.clone() for pool in (*pools, *parts)]
    first, second = mover.read([3, 1], [None, 2]).payloads
    assert (first.nbytes, second.nbytes) == (mover.block_bytes, mover.payload_bytes)
    for pool in (*pools, *parts):
        pool.blocks.zero_()
    mover.write([1, 4], [first, second])
    mover.write_parts([0], [second])
    for pool, blocks_before in zip(pools, before[:2], strict=True):
        assert torch.equal(pool.blocks[[1, 4]], blocks_before[[3, 1]])
    for pool, blocks_before in zip(parts, before[2:], strict=True):
        assert torch.equal(pool.blocks[0], blocks_before[2])
    assert len({payload_layout(some_pools) for some_pools in (pools, pools[::-1], pools[:1])}) == 3
