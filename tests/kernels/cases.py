"""Ragged batches with awkward sizes, over a pool whose untouched slots are poison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

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
) -> Step:
    """Place the requests in shuffled blocks, fill their slots with normal noise and all others with poison."""
    generator = torch.Generator().manual_seed(seed)
    kv_lens = [p + q for p, q in zip(prefix_lens, query_lens, strict=True)]
    num_used = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(num_used) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).numpy().astype(np.int32)
    tables = np.split(shuffled, np.cumsum(num_used))[: len(kv_lens)]
    pool = poisoned_pool(num_blocks, heads.num_kv_heads, block_size, head_dim, kv_dtype or dtype, device)
    for table, kv_len in zip(tables, kv_lens, strict=True):
        slots = PagedBatch.build([kv_len], [kv_len], [table], block_size, device).slots
        noise = torch.randn(kv_len, 2, heads.num_kv_heads, head_dim, generator=generator).to(device, dtype)
        reference.write_kv(noise[:, 0], noise[:, 1], slots, pool, LAYER)
    query = torch.randn(sum(query_lens), heads.num_query_heads, head_dim, generator=generator).to(device, dtype)
    return Step(query, pool, PagedBatch.build(query_lens, kv_lens, tables, block_size, device))


def share(step: Step, shared_blocks: Mapping[int, tuple[int, int]]) -> Step:
    """Let requests begin with the blocks of others, in this order.

    Args:
        step: requests that share nothing.
        shared_blocks: by request, whose first blocks it takes and their number.
    """
    batch = step.batch
    tables = batch.host_tables.copy()
    for request, (other, num_blocks) in shared_blocks.items():
        tables[request, :num_blocks] = tables[other, :num_blocks]
    lens = batch.query_lens.tolist(), batch.kv_lens
    built = PagedBatch.build(*lens, list(tables), batch.block_size, batch.block_tables.device)
    return Step(step.query, step.pool, built)


def alone(step: Step, request: int) -> Step:
    """Return the step of one of the requests."""
    batch = step.batch
    start, end = batch.query_starts[request : request + 2]
    table, device = batch.host_tables[request], batch.block_tables.device
    built = PagedBatch.build([end - start], [batch.kv_lens[request]], [table], batch.block_size, device)
    return Step(step.query[start:end], step.pool, built)


def poisoned_pool(
    num_blocks: int,
    num_kv_heads: int = 2,
    block_size: int = 16,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> KVPool:
    """Blocks of NaN: of NaN scales where the numbers themselves are integers."""
    pool = KVPool.allocate(num_blocks, NUM_LAYERS, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
    pool.blocks.fill_(0xFF)
    return pool


def clone(pool: KVPool) -> KVPool:
    """The same K/V in other memory."""
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = pool.values.shape
    copied = KVPool.allocate(
        num_blocks, num_layers, num_kv_heads, block_size, pool.head_dim, dtype=pool.dtype, device=pool.blocks.device
    )
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


def attention_by_num_rows(sums_over: Literal["keys", "head_dim"]) -> Callable[..., torch.Tensor]:
    """Make a fused attention that adds up the other way round from 64 rows on, as some processors' libraries do.

    Args:
        sums_over: which of its sums.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        if query.shape[-2] >= 64 and sums_over == "keys":
            key, value, visible = key.flip(-2), value.flip(-2), visible.flip(-1)
        elif query.shape[-2] >= 64:
            query, key = query.flip(-1), key.flip(-1)
        return scaled_dot_product_attention(query, key, value, visible, **options)

    return attend
