"""Reference implementations of all kernels in plain PyTorch, against which the fast kernels are tested."""

from __future__ import annotations

import torch
from torch.nn import functional

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.norm_style import TORCH, NormStyle
from radixkv.kernels.quantization import INT4, hadamard_size, key_dtype, quantize
from radixkv.kernels.scoring import Scoring


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    slots: torch.Tensor,
    pool: KVPool,
    layer: int,
    max_magnitudes: torch.Tensor | None = None,
) -> None:
    """Write the K and V of new tokens into their slots of one layer, in place.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`; rounded or quantized to the pool's dtype.
        value: like `key`; None for a latent pool, in which a key is also the value.
        slots: int64 `[num_tokens]`, `block_id * block_size + offset`, all different.
        pool: the K/V.
        layer: index into the pool's layers.
        max_magnitudes: float32 `[num_tokens, num_kv_heads]`, the largest magnitude in K and V of all layers so far,
            NaN if one was NaN. Updated in place with the magnitudes of this layer. None if it is not needed.
    """
    written = (key,) if value is None else (key, value)
    if max_magnitudes is not None:
        for vectors in written:
            torch.maximum(max_magnitudes, vectors.abs().amax(dim=-1), out=max_magnitudes)
    block_ids, offsets = slots // pool.block_size, slots % pool.block_size
    stored_rows = []
    for k_or_v, vectors in enumerate(written):
        if pool.scales is None:
            stored = vectors.to(pool.dtype)
        else:
            stored, scales = quantize(vectors, pool.dtype if k_or_v else key_dtype(pool.dtype))
            pool.scales[block_ids, layer, k_or_v, :, offsets] = scales
        stored_rows.append(stored)
    if pool.dtype == INT4:
        stored_rows = [torch.cat(stored_rows, dim=-1)]  # the value follows the key
    for k_or_v, stored in enumerate(stored_rows):
        pool.values[block_ids, layer, k_or_v, :, offsets] = stored


def hadamard_transform(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Apply the orthonormal Hadamard transform to each block of `hadamard_size` elements of each vector.

    It preserves norms and dot products, and is its own inverse. An outlier in one element is spread over all elements
    of its block, so that one scale for the vector loses less precision in the other elements.

    Source: the fast Walsh-Hadamard transform; before quantizing: QuaRot, https://arxiv.org/abs/2404.00456.

    >>> hadamard_transform(torch.tensor([[[8.0, 0.0, 0.0, 0.0]]]), torch.float32)
    tensor([[[4., 4., 4., 4.]]])

    Args:
        vectors: `[num_tokens, num_heads, head_dim]`, floating point.
        dtype: dtype of the result; the sums are float32.

    Returns:
        A new tensor like `vectors`. The bits of a vector do not depend on other vectors.
    """
    block_size = hadamard_size(vectors.shape[-1])
    factor: float = block_size**-0.5
    numbers, half = vectors.float(), 1
    while half < block_size:
        pairs = torch.unflatten(numbers, -1, (-1, 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        numbers = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return (numbers * factor).to(dtype)


def paged_attention(
    query: torch.Tensor,
    pool: KVPool,
    layer: int,
    batch: PagedBatch,
    scoring: Scoring,
) -> torch.Tensor:
    """Compute causal attention from each request's suffix to its cached prefix and to the suffix itself.

    A token at position `p` attends to positions `[0, p]`, or `(p - window, p]` with a window. Query head `h` reads KV
    head `h // (num_query_heads // num_kv_heads)`. Slots at or past a request's `kv_len` are never read. The arithmetic
    is float32.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`, packed according to `batch.query_starts`.
        pool: the K/V; the suffix is already written.
        layer: index into the pool's layers.
        batch: the rows of each request, and the location of its K/V.
        scoring: how scores are computed, and which keys a query attends to.

    Returns:
        A new tensor shaped and typed like `query`.
    """
    output = torch.empty_like(query)
    group_size = query.shape[1] // pool.num_kv_heads
    for i, kv_len in enumerate(batch.kv_lens):
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        positions = torch.arange(kv_len, device=query.device)
        block_ids = batch.block_tables[i].long()[positions // batch.block_size]
        index = (block_ids, layer, slice(None), slice(None), positions % batch.block_size)
        scales = None if pool.scales is None else pool.scales[index].transpose(0, 1)
        # [2, kv_len, num_kv_heads, head_dim], [1, ...] in a latent pool
        kv = pool.to_numbers(pool.values[index].transpose(0, 1), scales)
        key = kv[0].repeat_interleave(group_size, dim=1)  # [kv_len, num_query_heads, head_dim]
        value = kv[-1].repeat_interleave(group_size, dim=1)

        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), key) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        query_positions = positions[kv_len - (rows.stop - rows.start) :, None]
        is_visible = positions <= query_positions
        if scoring.window is not None:
            is_visible &= positions > query_positions - scoring.window
        scores = scores.masked_fill(~is_visible, float("-inf"))  # [num_query_heads, num_rows, kv_len]
        if scoring.sinks is not None:
            sinks = scoring.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., :kv_len]
        output[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
    return output


def copy_blocks(pool: KVPool, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks, all layers of K and V, in place.

    Args:
        pool: the K/V.
        sources: int64 `[num_copies]` block ids.
        targets: int64 `[num_copies]` block ids, all different and none of them a source.
    """
    pool.blocks[targets] = pool.blocks[sources]


def dequantize_blocks(pool: KVPool, layer: int, block_ids: torch.Tensor, dtype: torch.dtype) -> KVPool:
    """Dequantize one layer of some blocks into a new pool.

    Args:
        pool: the K/V, quantized.
        layer: index into the pool's layers.
        block_ids: int32 `[num_blocks]`.
        dtype: dtype of the new pool.

    Returns:
        A new pool of one layer, owned by the caller. Its block `i` is block `block_ids[i]` of `pool`.
    """
    assert pool.scales is not None
    size = (block_ids.shape[0], 1, pool.num_kv_heads, pool.block_size, pool.head_dim)
    plain = KVPool.allocate(*size, dtype=dtype, device=pool.blocks.device, is_latent=pool.is_latent)
    index = (block_ids.long(), layer)
    numbers = pool.to_numbers(pool.values[index].transpose(0, 1), pool.scales[index].transpose(0, 1), dtype)
    plain.values[:, 0] = numbers.transpose(0, 1)
    return plain


def rms_norm(rows: torch.Tensor, weight: torch.Tensor | None, eps: float, style: NormStyle = TORCH) -> torch.Tensor:
    """Divide rows by the root of the mean of their squares and multiply them by a weight.

    Args:
        rows: `[..., num_columns]`; the arithmetic is float32.
        weight: `[num_columns]`, or None for ones.
        eps: added to the mean of the squares.
        style: how the weight is applied.

    Returns:
        A new tensor like `rows`.
    """
    wide = rows.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if style.rounds_first:
        normed = normed.to(rows.dtype)
    if weight is not None:
        normed = normed * (weight.float() + style.weight_offset if style.weight_offset else weight)
    return normed.to(rows.dtype)


def add_rms_norm(
    rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, style: NormStyle = TORCH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a residual, and normalize the sums.

    Args:
        rows, residual: `[..., num_columns]` in one dtype.
        weight, eps, style: see `rms_norm`.

    Returns:
        The sums and their `rms_norm`, new tensors like `rows`.
    """
    sums = rows + residual
    return sums, rms_norm(sums, weight, eps, style)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply `silu(gate)`, rounded to its dtype, by `up`, element by element. Both are `[..., num_columns]`."""
    return functional.silu(gate) * up


def add_low_rank(
    rows: torch.Tensor, out: torch.Tensor, indices: torch.Tensor, down: torch.Tensor, up: torch.Tensor
) -> None:
    """Add `up @ (down @ row)` to some rows of a layer's output, in place. `down @ row` is rounded to the rows' dtype.

    Args:
        rows: `[num_rows, in_features]`.
        out: `[num_rows, out_features]`, like `rows` in dtype.
        indices: int64 `[n]`, indices of the rows to add to, all different.
        down: `[rank, in_features]`.
        up: `[out_features, rank]`.
    """
    inner = functional.linear(rows[indices].float(), down.float()).to(rows.dtype)
    out[indices] = (out[indices].float() + functional.linear(inner.float(), up.float())).to(out.dtype)
