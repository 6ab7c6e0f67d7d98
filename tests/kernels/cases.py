"""Ragged batches with awkward sizes, over a pool whose untouched slots are poison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.kernels.batch import PagedBatch

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
    """One step's inputs. Every slot outside the requests' kv_lens, and every other layer, holds NaN."""

    query: torch.Tensor
    pool: torch.Tensor
    batch: PagedBatch


def make_step(
    prefix_lens: Sequence[int],
    query_lens: Sequence[int],
    heads: Heads,
    *,
    block_size: int = 16,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Step:
    """Place the requests in shuffled blocks, fill their slots with normal noise and all others with NaN."""
    generator = torch.Generator().manual_seed(seed)
    kv_lens = [p + q for p, q in zip(prefix_lens, query_lens, strict=True)]
    num_used = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(num_used) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).numpy().astype(np.int32)
    tables = np.split(shuffled, np.cumsum(num_used))[: len(kv_lens)]
    pool = torch.full((num_blocks, NUM_LAYERS, 2, heads.num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    for table, kv_len in zip(tables, kv_lens, strict=True):
        positions = np.arange(kv_len)
        block_ids = torch.from_numpy(table[positions // block_size].astype(np.int64))
        noise = torch.randn(kv_len, 2, heads.num_kv_heads, head_dim, generator=generator).to(dtype)
        pool[block_ids, LAYER, :, :, torch.from_numpy(positions % block_size)] = noise
    query = torch.randn(sum(query_lens), heads.num_query_heads, head_dim, generator=generator).to(dtype)
    batch = PagedBatch.build(query_lens, kv_lens, tables, block_size, device)
    return Step(query.to(device), pool.to(device), batch)


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
