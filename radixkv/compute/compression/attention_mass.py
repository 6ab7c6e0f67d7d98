"""The attention that stored K/V entries get from queries, which the attention kernels do not tell."""

from __future__ import annotations

import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import dequantize
from radixkv.kernels.scoring import Scoring

_QUERIES_AT_ONCE = 16  # scores of 16 queries, 32 heads and 32,768 entries take 64 MiB


def attention_mass(
    query: torch.Tensor, pool: KVPool, layer: int, block_ids: torch.Tensor, num_entries: int, scoring: Scoring
) -> torch.Tensor:
    """Sum up the weights that each entry gets from the last queries of a request.

    The arithmetic is float32. It reads nothing of other requests, so that company changes no bit.

    Args:
        query: `[num_queries, num_query_heads, head_dim]`, those of the last entries.
        pool: the K/V; those of the queries are written.
        layer: index into the pool's layers.
        block_ids: int64, the request's blocks.
        num_entries: entries in these blocks.
        scoring: how scores are made. Without a window.

    Returns:
        float32 `[num_kv_heads, num_entries]`: sums over the queries and over the query heads that share a KV head.
    """
    assert scoring.window is None, "what a window leaves out is not known by the place of an entry"
    num_kv_heads = pool.num_kv_heads
    stored = pool.values[block_ids, layer, 0]  # [num_blocks, num_kv_heads, block_size, stored_dim]
    key = stored.float() if pool.scales is None else dequantize(stored, pool.scales[block_ids, layer, 0], pool.dtype)
    key = key.transpose(0, 1).flatten(1, 2)[:, :num_entries]  # [num_kv_heads, num_entries, head_dim]
    first = num_entries - query.shape[0]
    total = torch.zeros(num_kv_heads, num_entries, device=query.device)
    for start in range(0, query.shape[0], _QUERIES_AT_ONCE):
        rows = query[start : start + _QUERIES_AT_ONCE].float()
        by_head = torch.unflatten(rows, 1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
        scores = torch.matmul(by_head, key[:, None].transpose(2, 3)) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        places = torch.arange(num_entries, device=query.device)
        own = first + start + torch.arange(rows.shape[0], device=query.device)
        scores = scores.masked_fill(places > own[:, None], float("-inf"))  # [kv_heads, group, rows, num_entries]
        if scoring.sinks is not None:
            sinks = torch.unflatten(scoring.sinks.float(), 0, (num_kv_heads, -1))[:, :, None, None]
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
        total += scores.softmax(dim=-1)[..., :num_entries].sum(dim=(1, 2))
    return total
