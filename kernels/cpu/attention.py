"""Computes paged attention on a CPU: torch's fused attention over each piece of the keys, and a merge of the results.

`attention_plan.py` defines rows, tiles and pieces, and plans which rows attend to which pieces. For each group of rows:

    rows of a group    attend to their tails (masked) ────────┐
                       attend to each strip (without a mask) ─┴▶ partial results ──▶ merged in the order of the keys

The bits of an output row depend only on the prefix of its token: the fused attention sums each row in an order that
depends only on its keys, with three exceptions, which are avoided:

- It computes rows in blocks of at least 32, and sums the rows of a last block of fewer than four rows in another order.
  The number of rows is padded to a multiple of 16.
- In half precision, the order depends on the number of rows unless the number of terms is a multiple of 32. The terms
  of each sum are padded to such a number.
- It may split the sums of a single matmul among threads. `_attend` passes it the same matmul twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from radixkv.kernels.cpu.attention_plan import ROWS_MULTIPLE, Group, Strip, Tails, missing_dims
from radixkv.kernels.cpu.row_pieces import ELEMENTS_PER_CALL, VECTOR_ELEMENTS
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring

# The fused attention distributes blocks of at least this many rows over threads. Fewer rows are one block.
_ROWS_PER_BLOCK = 32

# Maximum number of scores in memory at once if the fused attention can't be used because of a softcap: 64 MiB in
# float32.
_MAX_SOFTCAP_SCORES = 1 << 24

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def paged_attention(
    query: torch.Tensor, pool: KVPool, layer: int, groups: Sequence[Group], scoring: Scoring
) -> torch.Tensor:
    """Compute `reference.paged_attention` in pieces.

    Partial results are rounded to the queries' dtype, and merged in float32. Slots that are not written yet may contain
    any values, NaN included. Besides the result, memory is needed for the pieces of one group.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`, packed according to the batch's `query_starts`; float32,
            bfloat16 or float16. K and V are rounded to this dtype.
        pool: the K/V; the suffix is already written.
        layer: index into the pool's layers.
        groups: the plan: `plan_cpu_attention(batch, AttentionSpec.of(query, pool, scoring))`.
        scoring: how scores are computed, and which keys a query attends to.

    Returns:
        A new tensor shaped and typed like `query`.
    """
    num_tokens, _, head_dim = query.shape
    output = query.new_empty(query.shape)
    outputs = output.view(num_tokens, pool.num_kv_heads, -1, head_dim).transpose(0, 1)
    for group in groups:
        rows = _rows_of(_select(query, 0, group.tokens), pool.num_kv_heads)
        attended = _attend_group(rows, pool, layer, group, scoring)[..., :head_dim]
        by_token = torch.unflatten(attended.to(query.dtype), 1, (group.num_tokens, -1))
        if isinstance(group.tokens, slice):
            outputs[:, group.tokens] = by_token
        else:
            outputs.index_copy_(1, group.tokens, by_token)
    return output


def _rows_of(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Pack the query heads of each KV head into the rows of one matrix.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`.

    Returns:
        `[num_kv_heads, num_rows + padding, head_dim + padding]`. The padding is zeros; that of the rows lets any range
        of rows be extended to a multiple of `ROWS_MULTIPLE`.
    """
    num_tokens, num_query_heads, head_dim = query.shape
    # [num_kv_heads, num_tokens, group_size, head_dim]
    by_head = torch.unflatten(query, 1, (num_kv_heads, -1)).transpose(0, 1)
    num_rows = num_tokens * (num_query_heads // num_kv_heads)
    padded_dim = head_dim + missing_dims(head_dim, query.dtype)
    rows = query.new_empty(num_kv_heads, num_rows + ROWS_MULTIPLE - 1, padded_dim)
    torch.unflatten(rows[:, :num_rows, :head_dim], 1, by_head.shape[1:3]).copy_(by_head)
    rows[:, num_rows:] = 0
    rows[:, :num_rows, head_dim:] = 0
    return rows


def _attend_group(rows: torch.Tensor, pool: KVPool, layer: int, group: Group, scoring: Scoring) -> torch.Tensor:
    """Compute the attention of the rows of a group.

    Args:
        rows: the result of `_rows_of`.

    Returns:
        `[num_kv_heads, num_rows, head_dim]` in float32, or in the queries' dtype if there was nothing to merge.
    """
    tail, tail_lse = _attend_tails(rows, pool, layer, group, scoring)
    if not group.strips and scoring.sinks is None:
        return tail
    num_kv_heads, num_rows = tail_lse.shape
    num_pieces = group.num_strip_pieces + 1  # the tail included
    num_sinks = 0 if scoring.sinks is None else 1  # a sink is merged like a piece without values
    num_padded_rows = num_rows + -num_rows % VECTOR_ELEMENTS
    lses = tail_lse.new_full((num_pieces + num_sinks, num_kv_heads, num_padded_rows), float("-inf"))
    lses[..., num_rows:] = 0
    lses[num_pieces - 1, :, :num_rows] = tail_lse
    if scoring.sinks is not None:
        lses[num_pieces, :, :num_rows] = scoring.sinks.view(num_kv_heads, -1).repeat(1, group.num_tokens)
    partials = []
    for strip in group.strips:
        first, end = strip.rows.start, strip.rows.stop
        strip_rows = rows[:, first : end + -(end - first) % ROWS_MULTIPLE]
        key, value = _strip_kv(pool, layer, strip, rows.dtype)
        partial, lse = _attend(strip_rows.expand(len(key), -1, -1, -1), key, value, None, scoring)
        lses[strip.pieces, :, strip.rows] = lse[..., : end - first]
        partials.append(partial[:, :, : end - first])
    shares = _replace_by_shares(lses)[:num_pieces, :, :num_rows, None]
    return _merge(group.strips, partials, tail, shares)


def _attend_tails(
    rows: torch.Tensor, pool: KVPool, layer: int, group: Group, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of the rows of a group over the tails of their tiles.

    Returns:
        `[num_kv_heads, num_rows, head_dim]`, and the logarithms of the sums of weights, `[num_kv_heads, num_rows]`.
    """
    attend = _attend if scoring.softcap is None else _attend_softcapped
    partials, lses = [], []
    for tails in group.tails:
        tile_rows = torch.unflatten(_select(rows, 1, tails.rows), 1, tails.positions.shape).transpose(0, 1)
        key, value = _tail_kv(pool, layer, tails, rows.dtype)
        partial, lse = attend(tile_rows, key, value, tails.mask(scoring.window, rows.dtype), scoring)
        partials.append(partial.transpose(0, 1).flatten(1, 2))
        lses.append(lse.transpose(0, 1).flatten(1, 2))
    partial = partials[0] if len(partials) == 1 else torch.cat(partials, dim=1)
    lse = lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)
    return _select(partial, 1, group.tail_rows), _select(lse, 1, group.tail_rows)


def _select(tensor: torch.Tensor, dim: int, selected: slice | torch.Tensor) -> torch.Tensor:
    """Select along a dimension: a range, as a view, or indices, as a copy."""
    if isinstance(selected, slice):
        return tensor.narrow(dim, selected.start, selected.stop - selected.start)
    return tensor.index_select(dim, selected)


def _strip_kv(pool: KVPool, layer: int, strip: Strip, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of a strip, `[num_units, num_kv_heads, unit_tokens, head_dim]` each."""
    if isinstance(strip.blocks, slice):  # read in place
        kv = pool.values[strip.blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
    else:
        kv = _copy_blocks(pool, layer, strip.blocks, dtype)
    kv = torch.unflatten(kv, 2, (-1, strip.unit_tokens)).transpose(1, 2)
    return kv[0], kv[-1]  # in a latent pool both are the same tensor


def _tail_kv(pool: KVPool, layer: int, tails: Tails, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values of tiles, `[num_tiles, num_kv_heads, num_keys, head_dim]` each. Unwritten slots are 0."""
    kv = _copy_blocks(pool, layer, tails.block_ids, dtype)
    if tails.unwritten is not None:
        kv.index_fill_(2, tails.unwritten, 0)
    end_key = tails.num_skipped_keys + tails.num_keys
    kv = torch.unflatten(kv, 2, (len(tails.first_keys), -1))[:, :, :, tails.num_skipped_keys : end_key]
    kv = kv.transpose(1, 2)
    return kv[0], kv[-1]


def _copy_blocks(pool: KVPool, layer: int, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy blocks of one layer into a contiguous `[2, num_kv_heads, num_tokens, head_dim]` of `dtype`.

    The first dimension is that of the pool's values: 1 in a latent pool.
    """
    # One index_select over the permuted view writes the final layout at once: 1.1 ms for 8 heads x 2112 tokens x 128
    # in float32 (0.46 in bfloat16), against 3.5 to 3.8 ms (1.8) for indexing and then transposing.
    by_head = pool.values[:, layer].permute(1, 2, 0, 3, 4)  # [2, num_kv_heads, num_blocks, block_size, head_dim]
    copied = by_head.index_select(2, block_ids).flatten(2, 3)
    scales = pool.scales
    if scales is not None:
        scales = scales[:, layer].permute(1, 2, 0, 3).index_select(2, block_ids).flatten(2, 3)
    kv = pool.to_numbers(copied, scales, dtype)
    padding = missing_dims(kv.shape[-1], dtype)
    return pad(kv, (0, padding)) if padding else kv


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with the fused kernel.

    Args:
        query: `[n, num_kv_heads, num_rows, head_dim]`, `num_rows` a multiple of `ROWS_MULTIPLE`.
        key, value: `[n, num_kv_heads, num_keys, head_dim]`.
        mask: `[n, 1, num_rows, num_keys]`, added to the scores; None if every row attends to every key.
        scoring: how scores are computed; without a softcap.

    Returns:
        Rows like `query`, and the logarithms of their sums of weights, float32 `[n, num_kv_heads, num_rows]`.
    """
    n, num_kv_heads, num_rows, _ = query.shape
    is_single = n * num_kv_heads == 1 and num_rows <= _ROWS_PER_BLOCK and torch.get_num_threads() > 1
    if is_single:
        # The library would split the sums of a single matmul over its threads, so it computes the same matmul twice.
        query, key, value = (tensor.expand(2, -1, -1, -1) for tensor in (query, key, value))
    rows, lse = _fused_attention(query, key, value, attn_mask=mask, scale=scoring.scale)
    return (rows[:1], lse[:1]) if is_single else (rows, lse)


def _attend_softcapped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `_attend` from separate operations, because no fused kernel of torch supports a softcap.

    Returns:
        Rows in float32, and zeros: these rows have no other piece.
    """
    assert scoring.softcap is not None
    assert scoring.sinks is None, "the softcapped path returns no sums of weights"
    n, num_kv_heads, num_rows, _ = query.shape
    rows = torch.empty(query.shape, dtype=torch.float32)
    num_copies = 2 if num_kv_heads == 1 and torch.get_num_threads() > 1 else 1  # as in `_attend`
    rows_per_call = max(1, _MAX_SOFTCAP_SCORES // (num_kv_heads * key.shape[2]) // ROWS_MULTIPLE) * ROWS_MULTIPLE
    for tile in range(n):
        tile_key, tile_value = (tensor[tile].float().repeat(num_copies, 1, 1) for tensor in (key, value))
        for start in range(0, num_rows, rows_per_call):
            row_range = slice(start, start + rows_per_call)
            scores = query[tile, :, row_range].float().repeat(num_copies, 1, 1) @ tile_key.mT
            scores.mul_(scoring.scale / scoring.softcap).tanh_().mul_(scoring.softcap)
            weights = scores.add_(mask[tile, :, row_range]).softmax(dim=-1)
            rows[tile, :, row_range] = (weights @ tile_value)[:num_kv_heads]
    return rows, rows.new_zeros(rows.shape[:3])


def _replace_by_shares(lses: torch.Tensor) -> torch.Tensor:
    """Replace logarithms of the sums of weights by shares of the softmax sum, in place.

    Args:
        lses: `[num_pieces, num_kv_heads, num_rows]`, -inf where a row has no piece. The pieces that every row has
            come last: its tail, and its sink if there are sinks.
    """
    weights = lses.sub_(lses.amax(0))
    for chunk in torch.split(weights.view(-1), ELEMENTS_PER_CALL):
        chunk.exp_()
    total = weights[0].clone()
    for weight in weights[1:].unbind():
        total.add_(weight)
    return weights.div_(total)


def _merge(
    strips: Sequence[Strip], partials: Sequence[torch.Tensor], tail: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Add up partial results, weighted by their share of the softmax sum, in the order of their positions.

    Multiplication and addition are separate operations: in a fused operation, the rounding may depend on the position
    of a number in the tensor.

    Args:
        strips, partials: in order; each partial `[num_units, num_kv_heads, rows of the strip, head_dim]`, may be
            overwritten.
        tail: `[num_kv_heads, num_rows, head_dim]`, the last piece of each row; may be overwritten.
        shares: float32 `[num_pieces, num_kv_heads, num_rows, 1]`.

    Returns:
        Float32 `[num_kv_heads, num_rows, head_dim]`.
    """
    merged: torch.Tensor | None = None
    for strip, partial in zip(strips, partials, strict=True):
        first_piece, *later_pieces = partial.float().mul_(shares[strip.pieces, :, strip.rows]).unbind()
        if merged is None and strip.rows == slice(0, tail.shape[1]):
            merged = first_piece
        else:
            if merged is None:
                merged = shares.new_full(tail.shape, -0.0)  # adding to -0.0 keeps the bits of every number, even -0.0
            merged[:, strip.rows].add_(first_piece)
        for piece in later_pieces:
            merged[:, strip.rows].add_(piece)
    last = tail.float().mul_(shares[-1])
    return last if merged is None else merged.add_(last)
