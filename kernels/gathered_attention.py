"""Computes paged attention on a CPU: gathers each request's blocks, then calls torch's fused attention.

A row of the result depends on its token's prefix alone, bit for bit, however the sequence is cut in two:

    position    0 ........ 256 ........ 512 ........ 768
    tiles       [---- 0 ----)[---- 1 ----)[---- 2 ----)        begin at multiples of 256, wherever the suffix begins
    keys of 1   [------------------------)                     all of [0, 512), the same number for all its rows
                                     zeros where nothing is written yet, and masked

The fused attention computes each row by itself, in an order that depends on its keys. But it takes 32 rows or more at
a time, and one to three rows left over in another order, so rows come in multiples of 16. Half precision has different
orders for few rows and for many, which agree on sums of a multiple of 32 numbers, so sums are padded to that.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import dequantize
from radixkv.kernels.scoring import Scoring

# Query tokens per call of the fused attention. A tile sees keys up to its own end only, so smaller tiles skip more of
# the causal triangle: 2048 tokens over 14 heads of 64 took 120 ms in tiles of 128 or 256, 142 in 512, 223 untiled
# (one thread, float32; bfloat16 alike). Smaller tiles also bound the mask: 256 x kv_len bytes.
_TILE_TOKENS = 256

# A matrix product of fewer than four rows takes another way through the library, with another order of sums.
_ROWS_MULTIPLE = 16

# From 64 rows on, processors with AMX take another way for half precision, which adds up numbers 32 at a time. Sums of
# another length come out differently, so head dims and windows are filled up with zeros.
_SUM_MULTIPLE = 32

# Below this many query tokens the query heads of a KV head become rows of one matrix. At one token that is 2x faster
# in float32 and 11x in bfloat16 (14 heads over 2, 2k prefix: 3.04 -> 0.29 ms); from 64 tokens on both forms are
# within noise and the folded one needs a mask `group_size` times larger.
_FOLD_BELOW_TOKENS = 64

# Scores held at once when a softcap rules out the fused attention: 64 MiB of float32.
_SOFTCAP_SCORES = 1 << 24


def paged_attention(
    query: torch.Tensor,
    pool: KVPool,
    layer: int,
    batch: PagedBatch,
    scoring: Scoring,
) -> torch.Tensor:
    """Compute `reference.paged_attention` with torch's fused attention.

    Besides the result, memory is needed for the K and V that one request sees, once more in float32 if the pool is
    quantized, and for one tile of mask or scores. Slots that are not written yet may hold anything.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`, packed as `batch.query_starts` says; float32, bfloat16 or
            float16. K and V are rounded to this dtype.
        pool: the K/V; the suffix is already written.
        layer: index into the pool's layers.
        batch: which rows belong to which request and where its K/V live.
        scoring: how scores are made, and which keys a query sees.

    Returns:
        A new tensor shaped and typed like `query`.
    """
    scale, window, softcap = scoring.scale, scoring.window, scoring.softcap
    output = torch.empty_like(query)
    head_dim = query.shape[-1]
    query = _fill_head_dim(query)
    for i, kv_len in enumerate(batch.kv_lens):
        first_row, end_row = batch.query_starts[i], batch.query_starts[i + 1]
        prefix_len = kv_len - (end_row - first_row)
        first_tile = prefix_len // _TILE_TOKENS * _TILE_TOKENS
        first_key = _first_visible(first_tile, window)
        first_block = _sum_start(first_key) // batch.block_size
        kv_start = first_block * batch.block_size  # position of kv's first token
        kv = _gather(pool, layer, batch.block_tables[i], first_block, kv_len, query.dtype)
        kv[:, :, : first_key - kv_start] = 0
        for tile in range(first_tile, kv_len, _TILE_TOKENS):
            seen_from = _sum_start(_first_visible(tile, window))
            key, value = kv[:, :, seen_from - kv_start : tile + _TILE_TOKENS - kv_start]  # [kv_heads, seen, head_dim]
            step = _TILE_TOKENS if softcap is None else _softcap_tokens(query.shape[1] * key.shape[1])
            for start in range(max(tile, prefix_len), min(tile + _TILE_TOKENS, kv_len), step):
                end = min(start + step, tile + _TILE_TOKENS, kv_len)
                rows = slice(first_row + start - prefix_len, first_row + end - prefix_len)
                visible = _visible(start, end, seen_from, tile + _TILE_TOKENS, window, query.device)
                if softcap is None:
                    attended = _attend(query[rows], key, value, visible, scale)
                else:
                    attended = _attend_softcapped(query[rows], key, value, visible, scale, softcap)
                output[rows] = attended[..., :head_dim]
    return output


def _fill_head_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Append zeros to the last dimension of half precision, up to a multiple of `_SUM_MULTIPLE`."""
    missing = -tensor.shape[-1] % _SUM_MULTIPLE
    return pad(tensor, (0, missing)) if missing and tensor.dtype != torch.float32 else tensor


def _sum_start(position: int) -> int:
    """Return the first key of sums that reach back to `position`."""
    return position // _SUM_MULTIPLE * _SUM_MULTIPLE


def _first_visible(position: int, window: int | None) -> int:
    """Return the first position that a query at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _visible(
    start: int, end: int, seen_from: int, seen_to: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return bool `[end - start, seen_to - seen_from]`: does query `start + row` see key `seen_from + column`?"""
    visible = torch.ones(end - start, seen_to - seen_from, dtype=torch.bool, device=device).tril_(start - seen_from)
    if window is not None:
        visible.triu_(start - seen_from - window + 1)
    return visible


def _gather(
    pool: KVPool, layer: int, block_table: torch.Tensor, first_block: int, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Copy blocks of one layer into a contiguous `[2, num_kv_heads, num_tokens, head_dim]` of `dtype`.

    It reaches from the first block to the end of the last tile, with zeros after `kv_len` tokens.
    """
    end_block = -(-kv_len // _TILE_TOKENS) * _TILE_TOKENS // pool.block_size
    block_ids = block_table[first_block:end_block]
    missing = end_block - first_block - block_ids.numel()
    if missing > 0:
        block_ids = torch.cat((block_ids, block_ids[:1].expand(missing)))
    # One index_select over the permuted view writes the final layout at once: 1.1 ms for 8 heads x 2112 tokens x 128
    # in float32 (0.46 in bfloat16), against 3.5 to 3.8 ms (1.8) for indexing and then transposing.
    by_head = pool.values[:, layer].permute(1, 2, 0, 3, 4)  # [2, num_kv_heads, num_blocks, block_size, stored_dim]
    gathered = by_head.index_select(2, block_ids).flatten(2, 3)
    if pool.scales is None:
        gathered = gathered.to(dtype)
    else:
        scales = pool.scales[:, layer].permute(1, 2, 0, 3).index_select(2, block_ids).flatten(2, 3)
        gathered = dequantize(gathered, scales, pool.dtype, dtype)
    gathered[:, :, kv_len - first_block * pool.block_size :] = 0
    return _fill_head_dim(gathered)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend from one tile `[tile, num_query_heads, head_dim]` with the fused kernel."""
    tile_tokens, num_query_heads, _ = query.shape
    num_kv_heads = key.shape[0]
    if tile_tokens >= _FOLD_BELOW_TOKENS:
        query, visible = _fill_rows(query, visible, rows_a_token=1, multiple=_ROWS_MULTIPLE)
        by_head = query.transpose(0, 1)[None]
        attended = scaled_dot_product_attention(
            by_head, key[None], value[None], visible, scale=scale, enable_gqa=num_query_heads != num_kv_heads
        )
        return attended[0].transpose(0, 1)[:tile_tokens]
    folded, key, value, visible = _fold(query, key, value, visible)
    attended = scaled_dot_product_attention(folded[None], key[None], value[None], visible[None], scale=scale)
    return _unfold(attended[0], num_query_heads, num_kv_heads)[:tile_tokens]


def _fill_rows(
    query: torch.Tensor, visible: torch.Tensor, *, rows_a_token: int, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat the last token until the rows are a multiple of `multiple`."""
    missing = -query.shape[0] % (multiple // math.gcd(rows_a_token, multiple))
    if missing == 0:
        return query, visible
    return (
        torch.cat((query, query[-1:].expand(missing, -1, -1))),
        torch.cat((visible, visible[-1:].expand(missing, -1))),
    )


def _fold(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the query heads of a KV head rows of one matrix.

    With several threads a single KV head becomes two with half of the rows each: the library would compute a lone
    product on all its threads, and its sums in parts.

    Args:
        query: `[tile, num_query_heads, head_dim]`.
        key, value: `[num_kv_heads, num_seen, head_dim]`.
        visible: `[tile, num_seen]`.

    Returns:
        Query `[num_matrices, num_rows, head_dim]`, key and value `[num_matrices, num_seen, head_dim]`, and visible
        `[1 or num_matrices, num_rows, num_seen]`. `num_rows` is a multiple of `_ROWS_MULTIPLE`.
    """
    num_kv_heads, head_dim = key.shape[0], key.shape[2]
    group_size = query.shape[1] // num_kv_heads
    is_lone = num_kv_heads == 1 and torch.get_num_threads() > 1
    query, visible = _fill_rows(query, visible, rows_a_token=group_size, multiple=(1 + is_lone) * _ROWS_MULTIPLE)
    by_group = query.reshape(-1, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    folded, visible = by_group.reshape(num_kv_heads, -1, head_dim), visible.repeat(group_size, 1)[None]
    if is_lone:
        folded, visible = folded.view(2, -1, head_dim), visible.view(2, -1, visible.shape[2])
        key, value = key.expand(2, -1, -1), value.expand(2, -1, -1)
    return folded, key, value, visible


def _unfold(folded: torch.Tensor, num_query_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Turn what was computed of folded queries back into `[tile, num_query_heads, head_dim]`."""
    group_size, head_dim = num_query_heads // num_kv_heads, folded.shape[2]
    return folded.reshape(num_kv_heads, group_size, -1, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def _softcap_tokens(scores_per_token: int) -> int:
    """Return how many query tokens keep one matrix of scores within its budget."""
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
    folded, key, value, visible = _fold(query, key, value, visible)
    scores = folded.float() @ key.float().mT  # [num_matrices, num_rows, num_seen]
    scores.mul_(scale / softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~visible, float("-inf"))
    attended = scores.softmax(dim=-1) @ value.float()
    return _unfold(attended, num_query_heads, num_kv_heads)[:tile_tokens].to(query.dtype)
