"""Paged attention without a GPU: gather each request's blocks into one run, then torch's fused attention."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from radixkv.kernels.batch import PagedBatch

# Query tokens per call of the fused attention. A tile sees keys up to its own end only, so smaller tiles skip more of
# the causal triangle: 2048 tokens over 14 heads of 64 took 120 ms in tiles of 128 or 256, 142 in 512, 223 untiled
# (one thread, float32; bfloat16 alike). Smaller tiles also bound the mask: 256 x kv_len bytes.
_TILE_TOKENS = 256

# Below this many query tokens the query heads of a KV head become rows of one matrix. At one token that is 2x faster
# in float32 and 11x in bfloat16 (14 heads over 2, 2k prefix: 3.04 -> 0.29 ms); from 64 tokens on both forms are
# within noise and the folded one needs a mask `group_size` times larger.
_FOLD_BELOW_TOKENS = 64

# Scores held at once when a softcap rules out the fused attention: 64 MiB of float32.
_SOFTCAP_SCORES = 1 << 24


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend as `reference.paged_attention` does, at the speed of torch's fused attention.

    Memory beyond the result is one request's K and V within reach plus one tile of mask or scores.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`, packed as `batch.query_starts` says; float32, bfloat16 or
            float16, the same as the pool.
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; the suffix is already written.
        layer: index into the pool's layers.
        batch: which rows belong to which request and where its K/V live.
        scale: what the dot products are multiplied with.
        window: visible tokens, the query token included; None for all.
        softcap: bends each scaled score `s` into `softcap * tanh(s / softcap)`; None for none.

    Returns:
        A new tensor shaped and typed like `query`.
    """
    output = torch.empty_like(query)
    for i, kv_len in enumerate(batch.kv_lens):
        first_row, end_row = batch.query_starts[i], batch.query_starts[i + 1]
        prefix_len = kv_len - (end_row - first_row)
        first_block = _first_visible(prefix_len, window) // batch.block_size
        kv = _gather(pool, layer, batch.block_tables[i, first_block : -(-kv_len // batch.block_size)])
        kv_start = first_block * batch.block_size  # position of kv's first token

        tile_tokens = _TILE_TOKENS if softcap is None else _softcap_tile_tokens(query.shape[1] * (kv_len - kv_start))
        for tile_start in range(prefix_len, kv_len, tile_tokens):
            tile_end = min(tile_start + tile_tokens, kv_len)
            rows = slice(first_row + tile_start - prefix_len, first_row + tile_end - prefix_len)
            seen_from = _first_visible(tile_start, window)
            key, value = kv[:, :, seen_from - kv_start : tile_end - kv_start]  # [num_kv_heads, num_seen, head_dim] each
            visible = _visible(tile_start, tile_end, seen_from, window, query.device)
            if softcap is None:
                output[rows] = _attend(query[rows], key, value, visible, scale)
            else:
                output[rows] = _attend_softcapped(query[rows], key, value, visible, scale, softcap)
    return output


def _first_visible(position: int, window: int | None) -> int:
    """Return the first position that a query at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _visible(start: int, end: int, seen_from: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return bool `[end - start, end - seen_from]`: does query `start + row` see key `seen_from + column`?"""
    visible = torch.ones(end - start, end - seen_from, dtype=torch.bool, device=device).tril_(start - seen_from)
    if window is not None:
        visible.triu_(start - seen_from - window + 1)
    return visible


def _gather(pool: torch.Tensor, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
    """Copy blocks of one layer into a contiguous `[2, num_kv_heads, num_tokens, head_dim]`."""
    # One index_select over the permuted view writes the final layout at once: 1.1 ms for 8 heads x 2112 tokens x 128
    # in float32 (0.46 in bfloat16), against 3.5 to 3.8 ms (1.8) for indexing and then transposing.
    by_head = pool[:, layer].permute(1, 2, 0, 3, 4)  # [2, num_kv_heads, num_blocks, block_size, head_dim]
    return by_head.index_select(2, block_ids).flatten(2, 3)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend from one tile `[tile, num_query_heads, head_dim]` with the fused kernel."""
    tile_tokens, num_query_heads, _ = query.shape
    num_kv_heads = key.shape[0]
    if tile_tokens >= _FOLD_BELOW_TOKENS:
        by_head = query.transpose(0, 1)[None]
        attended = scaled_dot_product_attention(
            by_head, key[None], value[None], visible, scale=scale, enable_gqa=num_query_heads != num_kv_heads
        )
        return attended[0].transpose(0, 1)
    folded = _fold(query, num_kv_heads)
    visible = visible.repeat(num_query_heads // num_kv_heads, 1)
    attended = scaled_dot_product_attention(folded[None], key[None], value[None], visible, scale=scale)
    return _unfold(attended[0], tile_tokens)


def _fold(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Turn `[tile, num_query_heads, head_dim]` into `[num_kv_heads, group_size * tile, head_dim]`."""
    tile_tokens, num_query_heads, head_dim = query.shape
    by_group = query.reshape(tile_tokens, num_kv_heads, num_query_heads // num_kv_heads, head_dim)
    return by_group.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)


def _unfold(folded: torch.Tensor, tile_tokens: int) -> torch.Tensor:
    """Undo `_fold`."""
    num_kv_heads, _, head_dim = folded.shape
    return folded.view(num_kv_heads, -1, tile_tokens, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def _softcap_tile_tokens(scores_per_token: int) -> int:
    """Return how many query tokens keep one tile of scores within its budget."""
    return max(1, min(_TILE_TOKENS, _SOFTCAP_SCORES // scores_per_token))


def _attend_softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attend from one tile with the scores spelled out: no fused kernel of torch takes a softcap."""
    tile_tokens, num_query_heads, _ = query.shape
    num_kv_heads = key.shape[0]
    scores = _fold(query, num_kv_heads).float() @ key.float().mT  # [num_kv_heads, group_size * tile, num_seen]
    scores.mul_(scale / softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~visible.repeat(num_query_heads // num_kv_heads, 1), float("-inf"))
    attended = scores.softmax(dim=-1) @ value.float()
    return _unfold(attended, tile_tokens).to(query.dtype)
