"""Computes attention on a GPU: suffix queries over the paged prefix and suffix of a ragged batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu import hopper_attention
from radixkv.kernels.gpu.attention_plan import AttentionPlan
from radixkv.kernels.gpu.softmax import Partials, base_2, keys_share, partial_rows, softmax_step
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4
from radixkv.kernels.scoring import Scoring


def paged_attention(
    query: torch.Tensor,
    pool: KVPool,
    layer: int,
    batch: PagedBatch,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    is_specialized: bool = False,
) -> torch.Tensor:
    """Compute `reference.paged_attention`.

    This takes one launch. If the plan splits, another launch merges the partial results. The warp-specialized kernel
    needs an additional launch, which copies the queries.

    Scores, softmax and sums are float32; the weights are rounded to the query's dtype before they are multiplied by V.
    The scales of a quantized pool are applied to the scores and the weights, not to K and V. For float16 queries over a
    quantized pool the weights are rounded to bfloat16, since a small weight times a small scale underflows in float16.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]` with a contiguous last dimension, packed according to
            `batch.query_starts`; float32, bfloat16 or float16.
        pool: the K/V, ordered by block and not latent; the suffix is already written. The block size is a power of two
            of at least 16.
        layer: index into the pool's layers.
        batch: the step that `plan` was made for.
        plan: `plan_attention` of `batch` for this window.
        scoring: how scores are computed, and which keys a query attends to.
        is_specialized: whether to use the warp-specialized kernel; see `hopper_attention.supports`.

    Returns:
        A new contiguous tensor shaped and typed like `query`.

    Raises:
        ValueError: the last dimension of `query` is strided, `plan` was made for another window or another number of
            query heads, or the warp-specialized kernel does not support these tensors.
    """
    if query.stride(-1) != 1:
        raise ValueError("query: expected a contiguous last dimension, got a strided one")
    if scoring.window != plan.window:
        raise ValueError(f"plan: expected one for window {scoring.window}, got one for window {plan.window}")
    num_query_heads, head_dim = query.shape[1:]
    num_kv_heads = pool.num_kv_heads
    if num_query_heads != plan.group_size * num_kv_heads:
        raise ValueError(f"plan: expected one for {num_query_heads} query heads, got {plan.group_size * num_kv_heads}")
    if is_specialized and not hopper_attention.supports(
        query.dtype, pool.dtype, head_dim, pool.block_size, plan.tile_rows
    ):
        raise ValueError(
            f"plan: the warp-specialized kernel does not support queries in {query.dtype} over a pool of "
            f"{pool.dtype} with {pool.block_size} tokens per block, a head dim of {head_dim} and {plan.tile_rows} rows "
            "per tile"
        )
    output = query.new_empty(query.shape)
    partials = Partials.allocate(plan, num_kv_heads, head_dim, query.device)
    attend = hopper_attention.launch if is_specialized else _launch
    base_2_scale, base_2_softcap = base_2(scoring.scale, scoring.softcap)
    attend(
        query,
        pool,
        layer,
        batch,
        plan,
        output,
        partials,
        scale=base_2_scale,
        softcap=base_2_softcap,
        sinks=scoring.sinks,
    )
    partials.merge_into(output, plan, scoring.sinks)
    return output


_INT4_PER_BYTE = 2
_INT4_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class _LaunchShape:
    """Keys that a program reads per iteration, and the number of its warps and pipeline stages."""

    tile_keys: int
    num_warps: int
    num_stages: int


def _launch_shape(dtype: torch.dtype, padded_dim: int, tile_rows: int) -> _LaunchShape:
    """Return a shape that compiles for sm_90 without spills, which `test_compile_sm90` checks."""
    if dtype == torch.float32:  # no tensor cores: matmuls pass through registers
        return _LaunchShape(tile_keys=16, num_warps=8, num_stages=2)
    if padded_dim > 128:
        return _LaunchShape(tile_keys=32, num_warps=4 if tile_rows == 16 else 8, num_stages=3)
    return _LaunchShape(tile_keys=64, num_warps=8 if tile_rows == 128 else 4, num_stages=3)


def _launch(
    query: torch.Tensor,
    pool: KVPool,
    layer: int,
    batch: PagedBatch,
    plan: AttentionPlan,
    output: torch.Tensor,
    partials: Partials,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    head_dim = query.shape[-1]
    padded_dim = triton.next_power_of_2(head_dim)
    shape = _launch_shape(query.dtype, padded_dim, plan.tile_rows)
    value_stride, scale_stride = pool.block_strides
    packed, packed_stride = None, 0
    if pool.dtype == INT4:
        packed, packed_stride = pool.values, value_stride
        if head_dim % _INT4_PER_WORD == 0:
            packed, packed_stride = packed.view(torch.int32), packed_stride // 4
    _attend_tile[(plan.work.shape[0], pool.num_kv_heads)](
        query,
        pool.values,
        packed,
        pool.scales,
        output,
        partials.rows,
        partials.lses,
        batch.block_tables,
        plan.work,
        plan.joined_rows,
        query.stride(0),
        query.stride(1),
        batch.block_tables.stride(0),
        value_stride,
        packed_stride,
        scale_stride,
        layer,
        plan.window,
        scale,
        softcap,
        sinks,
        NUM_KV_HEADS=pool.num_kv_heads,
        GROUP_SIZE=plan.group_size,
        BLOCK_SIZE=pool.block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        NUMBERS_PER_VALUE=1 if packed is None else _INT4_PER_BYTE * packed.element_size(),
        TILE_ROWS=plan.tile_rows,
        TILE_KEYS=shape.tile_keys,
        SCALE_COPIES=shape.num_warps // 4,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,  # triton's default changes with 3.10
    )


@triton.jit(do_not_specialize=["table_stride", "layer", "window"])  # type: ignore[untyped-decorator]
def _attend_tile(  # type: ignore[no-untyped-def]
    query,
    values,
    packed,
    scales,
    output,
    partials,
    partial_lses,
    block_tables,
    work,
    joined_rows,
    token_stride,
    head_stride,
    table_stride,
    value_stride,
    packed_stride,
    scale_stride,
    layer,
    window,
    scale,
    softcap,
    sinks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUMBERS_PER_VALUE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SCALE_COPIES: tl.constexpr,
):
    """Compute one work item of the plan for one KV head: attention of a tile of packed rows to a range of keys."""
    item = work + tl.program_id(0) * 8
    kv_head = tl.program_id(1)
    request = tl.load(item)
    first_token = tl.load(item + 1)
    num_tokens = tl.load(item + 2)
    prefix_len = tl.load(item + 3)
    first_row = tl.load(item + 4)
    kv_start = tl.load(item + 5)
    kv_end = tl.load(item + 6)
    if num_tokens == 0:  # an idle item in a CUDA graph
        return

    rows = first_row + tl.arange(0, TILE_ROWS)
    is_row = rows < tl.where(first_token < 0, num_tokens, num_tokens * GROUP_SIZE)
    is_joined = rows < tl.where(first_token < 0, num_tokens, 0)
    joined = joined_rows + rows * 3
    query_rows = tl.where(is_joined, tl.load(joined, mask=is_joined, other=0), first_token * GROUP_SIZE + rows)
    heads = kv_head * GROUP_SIZE + query_rows % GROUP_SIZE
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    is_number = is_row[:, None] & is_dim[None, :]
    token_rows = (query_rows // GROUP_SIZE).to(tl.int64)
    q_offsets = token_rows * token_stride + heads.to(tl.int64) * head_stride
    q = tl.load(query + q_offsets[:, None] + dims[None, :], mask=is_number, other=0.0)  # [TILE_ROWS, PADDED_DIM]

    table = block_tables + request.to(tl.int64) * table_stride
    V_ROWS: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE  # from a key to its value, or between their scales
    first_scale = (layer * 2 * NUM_KV_HEADS + kv_head).to(tl.int64) * BLOCK_SIZE  # from the beginning of a block
    # If values have 4 bits, an element of `packed` has as many of them as can be loaded at once. A row is then a key of
    # 2 * STORED_DIM such elements, followed by a value of STORED_DIM elements.
    STORED_DIM: tl.constexpr = HEAD_DIM // NUMBERS_PER_VALUE
    ROW_SIZE: tl.constexpr = HEAD_DIM if packed is None else HEAD_DIM + HEAD_DIM // 2
    first_key = first_scale  # in rows
    if packed is not None:
        first_key = (layer * NUM_KV_HEADS + kv_head).to(tl.int64) * BLOCK_SIZE
        stored_dims = tl.arange(0, PADDED_DIM // NUMBERS_PER_VALUE)
        is_stored_dim = stored_dims < STORED_DIM
    query_positions = (prefix_len + tl.where(is_joined, 0, rows // GROUP_SIZE))[:, None]

    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    keys = tl.arange(0, TILE_KEYS)
    offsets = (keys * ROW_SIZE)[:, None] + dims[None, :]
    if packed is not None:
        packed_offsets = ((keys * 3 + 2) * STORED_DIM)[:, None] + stored_dims[None, :]
    for tile_start in tl.range(kv_start, kv_end, TILE_KEYS):
        positions = tile_start + keys
        if BLOCK_SIZE >= TILE_KEYS:  # the tile lies inside one block
            block_id = tl.load(table + tile_start // BLOCK_SIZE).to(tl.int64)
            first_key_row = first_key + tile_start % BLOCK_SIZE
            key_pointers = values + (block_id * value_stride + first_key_row * ROW_SIZE) + offsets
            scale_rows = (block_id * scale_stride + first_scale + tile_start % BLOCK_SIZE) + keys
            if packed is not None:
                packed_pointers = packed + (block_id * packed_stride + first_key_row * 3 * STORED_DIM) + packed_offsets
        else:
            block_ids = tl.load(table + positions // BLOCK_SIZE, mask=positions < kv_end, other=0).to(tl.int64)
            key_rows = first_key + positions % BLOCK_SIZE
            starts = block_ids * value_stride + key_rows * ROW_SIZE
            key_pointers = values + starts[:, None] + dims[None, :]
            scale_rows = block_ids * scale_stride + first_scale + positions % BLOCK_SIZE
            if packed is not None:
                packed_starts = block_ids * packed_stride + (key_rows * 3 + 2) * STORED_DIM
                packed_pointers = packed + packed_starts[:, None] + stored_dims[None, :]
        k = tl.load(key_pointers, mask=is_dim[None, :], other=0.0)
        k = stored_numbers(k, q.dtype, 1, TILE_ROWS)
        scores = tl.dot(q, k.T, input_precision="ieee")  # [TILE_ROWS, TILE_KEYS]
        is_written = positions < kv_end
        if scales is not None:
            # At least one number per thread. With fewer, each thread would load all the scales that it multiplies by.
            k_or_v = tl.arange(0, 2 * SCALE_COPIES) % 2
            scale_pairs = tl.load(
                scales + scale_rows[:, None] + k_or_v[None, :] * V_ROWS, mask=is_written[:, None], other=0.0
            )
            if SCALE_COPIES == 2:
                scale_pairs, _ = tl.split(tl.permute(tl.reshape(scale_pairs, (TILE_KEYS, 2, 2)), (0, 2, 1)))
            key_scales, value_scales = tl.split(scale_pairs)
            scores = scores * key_scales[None, :]
        # Positions relative to the tile need a subtraction per row instead of per key. For 16 rows, the registers are
        # needed elsewhere.
        origin = 0 if TILE_ROWS == 16 else tile_start
        weights, row_max, row_sum, rescale = softmax_step(
            scores, positions - origin, query_positions - origin, row_max, row_sum, window, scale, softcap
        )
        # Slots past the end may contain NaN, and 0 * NaN is NaN, so V is masked by position.
        if packed is None:
            v = tl.load(key_pointers + V_ROWS * HEAD_DIM, mask=is_written[:, None] & is_dim[None, :], other=0.0)
        else:
            v = tl.load(packed_pointers, mask=is_written[:, None] & is_stored_dim[None, :], other=0)
        if scales is not None:
            weights = weights * value_scales[None, :]
        weight_dtype = tl.bfloat16 if scales is not None and q.dtype == tl.float16 else q.dtype
        v = stored_numbers(v, weight_dtype, NUMBERS_PER_VALUE, TILE_ROWS)
        acc = tl.dot(weights.to(weight_dtype), v, acc * rescale[:, None], input_precision="ieee")

    safe_sum = tl.where(row_sum > 0, row_sum, 1.0)
    acc = acc / safe_sum[:, None]
    if sinks is not None:  # computed before `partial` is loaded; otherwise float32 with 64 dimensions spills
        shares = keys_share(row_max + tl.log2(safe_sum), sinks, heads)
    partial = tl.load(item + 7)  # loaded only here, because it would occupy a register during the loop
    if partial < 0:
        if sinks is not None:
            acc *= shares[:, None]
        out_offsets = (token_rows * (NUM_KV_HEADS * GROUP_SIZE) + heads) * HEAD_DIM
        tl.store(output + out_offsets[:, None] + dims[None, :], acc.to(output.dtype.element_ty), mask=is_number)
    else:
        part_rows = partial_rows(joined, is_joined, partial, TILE_ROWS).to(tl.int64) * NUM_KV_HEADS + kv_head
        tl.store(partial_lses + part_rows, row_max + tl.log2(safe_sum), mask=is_row)  # -inf if no key was visible
        tl.store(partials + part_rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_number)


@triton.jit  # type: ignore[untyped-decorator]
def stored_numbers(values, dtype: tl.constexpr, NUMBERS_PER_VALUE: tl.constexpr, TILE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert stored values `[rows, dims // NUMBERS_PER_VALUE]` to numbers `[rows, dims]` of `dtype`, exactly.

    They are converted through float32, since the interpreter does not convert integers to bfloat16.
    """
    if NUMBERS_PER_VALUE == 8:
        halves = tl.join(values, values >> 16)
        evens = tl.join(_nibble(halves, 0), _nibble(halves, 8))
        odds = tl.join(_nibble(halves, 4), _nibble(halves, 12))
        values = tl.reshape(tl.join(evens, odds), (values.shape[0], values.shape[1] * NUMBERS_PER_VALUE))
    else:
        if NUMBERS_PER_VALUE == 2:
            values = tl.interleave((values << 4) >> 4, values >> 4)
        if values.dtype == dtype:
            return values
        values = values.to(tl.float32)
    if TILE_ROWS == 16:
        # A sum of one number hides the conversion from the compiler, which would otherwise load V in smaller pieces.
        values = tl.sum(tl.reshape(values, (values.shape[0], values.shape[1], 1)), 2)
    return values.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _nibble(words, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the signed four-bit integers that start at bit `SHIFT` of each word, as float32.

    The bits become the last ones of a float between 2^23 and 2^24: two instructions, where a conversion takes four.
    """
    bits = (words & (15 << SHIFT)) ^ (0x4B000000 + (8 << SHIFT))
    return bits.to(tl.float32, bitcast=True) * (1.0 / (1 << SHIFT)) - (8388608.0 / (1 << SHIFT) + 8.0)
