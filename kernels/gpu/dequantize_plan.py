"""Plans which blocks of a quantized pool a step dequantizes before attention rather than inside it.

The attention kernel dequantizes each key again for each tile of queries. With many tiles it is cheaper to dequantize
once, into plain blocks (unquantized, in the dtype of the queries), and to attend over these:

    request 0   [ 7 | 2 | 9 ]         plain blocks  0  1  2  3         request 0   [ 2 | 0 | 3 ]
    request 1   [ 7 | 2 | 4 ]   ──▶   of blocks     2  4  7  9   ──▶   request 1   [ 2 | 0 | 1 ]

A block that several requests share is dequantized once. A block that no query of the step sees is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import first_key
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.staging import to_device

# Blocks are dequantized first if on average at least this number of query rows attends to a key; each token has one
# row per query head of a group. This is an estimate, not a measurement. For 64 keys of 128 dimensions in 8 bits, each
# tile of 128 rows saves 206 instructions per warp, which take 412 cycles. Dequantizing reads and writes 64 KiB more,
# which takes 4,900 cycles at a multiprocessor's share of 3 TB/s. So it would be faster from 1,500 rows on; the launches
# take time, too.
_MIN_ROWS_PER_KEY = 1600

# Steps of at most this number of tokens do not dequantize first, except in trials, so their launches do not depend on
# the blocks that they read.
MAX_SHORT_TOKENS = 128

# Maximum memory of plain blocks, which exist while a layer attends: 131,072 tokens of 8 heads of 128 dimensions.
_MAX_PLAIN_BYTES = 512 << 20

_DTYPES = (torch.bfloat16, torch.float16)  # the kernel uses no tensor cores for float32


@dataclass(frozen=True, slots=True)
class DequantizePlan:
    """Blocks to dequantize in each layer of one step, for layers with equally many query heads and the same window.

    Attributes:
        block_ids: int32 `[num_blocks]` on the device, all different. Plain block `i` holds block `block_ids[i]`.
        batch: the step with block tables of plain blocks. Its slots still point into the quantized pool.
    """

    block_ids: torch.Tensor
    batch: PagedBatch


def plan_dequantize(
    batch: PagedBatch,
    pool: KVPool,
    *,
    num_query_heads: int,
    dtype: torch.dtype,
    window: int | None = None,
    is_forced: bool = False,
) -> DequantizePlan | None:
    """Choose the blocks that are dequantized before a step attends; None if it is cheaper inside attention.

    There is one decision for the whole step: the keys of requests that only decode are counted, and dequantized too.

    Args:
        batch: the token rows of the step.
        pool: the K/V.
        num_query_heads: query heads of these layers, a multiple of the pool's KV heads.
        dtype: dtype of the queries, and of plain blocks.
        window: number of tokens that a query sees, including its own; None for all.
        is_forced: whether to dequantize first even if it is slower.

    Returns:
        A plan whose tensors are on the device of `batch.block_tables`. None if the pool is not quantized, or the
        queries are float32. Unless forced, also None if the step is short, too few rows see each key, or plain blocks
        would take more than 512 MiB.
    """
    if pool.scales is None or dtype not in _DTYPES:
        return None
    group_size = num_query_heads // pool.num_kv_heads
    # A key is seen by at most all rows of the step, so most steps can be decided without looking at their blocks.
    if not is_forced and (batch.num_tokens <= MAX_SHORT_TOKENS or batch.num_tokens * group_size < _MIN_ROWS_PER_KEY):
        return None

    kv_lens = np.array(batch.kv_lens)
    first_block = first_key(kv_lens - batch.query_lens, window) // batch.block_size
    column = np.arange(batch.host_tables.shape[1])
    is_read = (column >= first_block[:, None]) & (column < -(-kv_lens // batch.block_size)[:, None])
    keys_per_token = batch.positions + 1
    if window is not None:
        keys_per_token = np.minimum(keys_per_token, window)
    num_pairs = int(keys_per_token.sum())  # of a token and a key that it attends to
    block_ids, plain_ids = np.unique(batch.host_tables[is_read], return_inverse=True)
    block_bytes = 2 * pool.num_kv_heads * pool.block_size * pool.head_dim * dtype.itemsize
    num_keys = block_ids.size * batch.block_size
    if not is_forced and (
        block_ids.size * block_bytes > _MAX_PLAIN_BYTES or num_pairs * group_size < _MIN_ROWS_PER_KEY * num_keys
    ):
        return None

    tables = np.zeros_like(batch.host_tables)
    tables[is_read] = plain_ids
    device = batch.block_tables.device
    plain_batch = replace(batch, block_tables=to_device(torch.from_numpy(tables), device), host_tables=tables)
    return DequantizePlan(to_device(torch.from_numpy(block_ids), device), plain_batch)
