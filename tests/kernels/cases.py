"""Ragged batches with awkward sizes, over a pool whose unwritten slots contain poison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool

LAYER = 1
NUM_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Heads:
    """The head counts of one model."""

    num_query_heads: int
    num_kv_heads: int


MHA = Heads(2, 2)
GQA = Heads(6, 2)
MQA = Heads(4, 1)


@dataclass(frozen=True, slots=True)
class Step:
    """One step's inputs. Every slot outside the requests' kv_lens, and every other layer, is poison."""

    query: torch.Tensor
    pool: KVPool
    batch: PagedBatch


def make_step(
    prefix_lens: Sequence[int],
    query_lens: Sequence[int],
    heads: Heads,
    *,
    block_size: int = 16,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    is_adjacent: bool = False,
    is_latent: bool = False,
) -> Step:
    """Place the requests in blocks, fill their slots with normal noise and all others with poison.

    Args:
        prefix_lens, query_lens: tokens of each request whose K/V are in the pool before the step, and tokens of the
            step. Both have their K/V in the returned pool.
        heads: the head counts.
        block_size, head_dim, dtype, device, seed: shape, dtype of the queries, device and seed of the noise.
        kv_dtype: dtype of the pool; None for `dtype`.
        is_adjacent: whether each request has adjacent blocks of a pool that is ordered by layer; otherwise the blocks
            are shuffled.
        is_latent: whether the pool stores latents, which are both keys and values.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_lens = [p + q for p, q in zip(prefix_lens, query_lens, strict=True)]
    blocks_per_request = [-(-kv_len // block_size) for kv_len in kv_lens]
    num_blocks = sum(blocks_per_request) + 3  # three blocks belong to no request
    shuffled = torch.randperm(num_blocks, generator=generator).numpy().astype(np.int32)
    block_ids = np.arange(num_blocks, dtype=np.int32) if is_adjacent else shuffled
    tables = np.split(block_ids, np.cumsum(blocks_per_request))[: len(kv_lens)]
    pool = poisoned_pool(
        num_blocks,
        heads.num_kv_heads,
        block_size,
        head_dim,
        kv_dtype or dtype,
        device,
        is_by_layer=is_adjacent,
        is_latent=is_latent,
    )
    for table, kv_len in zip(tables, kv_lens, strict=True):
        slots = PagedBatch.build([kv_len], [kv_len], [table], block_size, device).slots
        noise = torch.randn(kv_len, 2, heads.num_kv_heads, head_dim, generator=generator).to(device, dtype)
        reference.write_kv(noise[:, 0], None if is_latent else noise[:, 1], slots, pool, LAYER)
    query = torch.randn(sum(query_lens), heads.num_query_heads, head_dim, generator=generator).to(device, dtype)
    return Step(query, pool, PagedBatch.build(query_lens, kv_lens, tables, block_size, device))


def share(step: Step, shared_blocks: Mapping[int, tuple[int, int]]) -> Step:
    """Let requests begin with blocks of others, one request after the other.

    Args:
        step: requests that share nothing.
        shared_blocks: by request, the request whose first blocks it gets, and their number.
    """
    batch = step.batch
    tables = batch.host_tables.copy()
    for request, (source, num_blocks) in shared_blocks.items():
        tables[request, :num_blocks] = tables[source, :num_blocks]
    query_lens, device = batch.query_lens.tolist(), batch.block_tables.device
    sharing_batch = PagedBatch.build(query_lens, batch.kv_lens, list(tables), batch.block_size, device)
    return Step(step.query, step.pool, sharing_batch)


def alone(step: Step, request: int) -> Step:
    """Return a step of one of the requests alone, with all its query tokens."""
    batch = step.batch
    start, end = batch.query_starts[request : request + 2]
    table, device = batch.host_tables[request], batch.block_tables.device
    batch_of_one = PagedBatch.build([end - start], [batch.kv_lens[request]], [table], batch.block_size, device)
    return Step(step.query[start:end], step.pool, batch_of_one)


def cut(step: Step, request: int, start: int, end: int) -> tuple[torch.Tensor, PagedBatch]:
    """Return the queries of tokens `[start, end)` of one request's suffix, and a batch of these tokens alone."""
    first, last = step.batch.query_starts[request : request + 2]
    prefix_len = step.batch.kv_lens[request] - (last - first)
    table = step.batch.host_tables[request]
    batch = PagedBatch.build([end - start], [prefix_len + end], [table], step.batch.block_size)
    return step.query[first + start : first + end], batch


def poisoned_pool(
    num_blocks: int,
    num_kv_heads: int = 2,
    block_size: int = 16,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    is_by_layer: bool = False,
    is_latent: bool = False,
) -> KVPool:
    """Allocate a pool of NaN; a pool of integers has scales of NaN."""
    size = (num_blocks, NUM_LAYERS, num_kv_heads, block_size, head_dim)
    pool = KVPool.allocate(*size, dtype=dtype, device=device, is_by_layer=is_by_layer, is_latent=is_latent)
    pool.blocks.fill_(0xFF)
    return pool


def clone(pool: KVPool) -> KVPool:
    """Copy a pool with its K/V."""
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = pool.values.shape
    size = (num_blocks, num_layers, num_kv_heads, block_size, pool.head_dim)
    copied = KVPool.allocate(*size, dtype=pool.dtype, device=pool.blocks.device, is_by_layer=pool.is_by_layer)
    copied.blocks.copy_(pool.blocks)
    return copied


# (prefix_lens, query_lens) for a block of 16 tokens: lengths around the block, no prefix, prefixes that end inside a
# block, several requests.
RAGGED = {
    "one token": ([0], [1]),
    "block minus one": ([0], [15]),
    "one block": ([0], [16]),
    "block plus one": ([0], [17]),
    "no prefix": ([0], [37]),
    "prefix of one block": ([16], [17]),
    "prefix ends inside a block": ([21], [16]),
    "one token over a long prefix": ([83], [1]),
    "three requests": ([0, 37, 5], [17, 1, 37]),
}


def attention_by_num_rows(sums_over: Literal["keys", "head_dim"]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Make a fused attention whose summation order is reversed from 64 rows on.

    The libraries of some processors also change the order with the number of rows.

    Args:
        sums_over: the sums whose order is reversed: those over the keys, or those over the head dim.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attn_mask: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if query.shape[-2] >= 64 and sums_over == "keys":
            key, value, attn_mask = key.flip(-2), value.flip(-2), None if attn_mask is None else attn_mask.flip(-1)
        elif query.shape[-2] >= 64:
            query, key = query.flip(-1), key.flip(-1)
        fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        rows, lse = fused_attention(query, key, value, attn_mask=attn_mask, scale=scale)
        return rows, lse

    return attend
