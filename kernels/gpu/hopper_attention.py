"""Computes paged attention on Hopper GPUs with specialized warps: some only load, the others only compute.

    4 warps   load      q | k 0  v 0 | k 1  v 1 | k 2  v 2 | ...         tiles into a ring of shared memory
    4 warps   compute           rows  0 to  63 of tile 0 | tile 1 | ...
    4 warps   compute           rows 64 to 127 of tile 0 | tile 1 | ...

The tensor memory accelerator (TMA) loads a whole tile with one instruction. The compiler assigns the roles, but only if
the kernel has 4 warps and a single loop, loads all tensors through two-dimensional descriptors that it creates itself,
and has no branch around the use of the results. Otherwise all warps do everything, without a warning, so
`test_compile_sm90` checks the number of warps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import AttentionPlan
from radixkv.kernels.gpu.attention_splits import KEY_ALIGNMENT_TOKENS
from radixkv.kernels.gpu.softmax import Partials, keys_share, partial_rows, softmax_step
from radixkv.kernels.kv_pool import KVPool

# Rows of a tile: 64 for each of the two groups of warps that compute.
TILE_ROWS = 128

_TILE_KEYS = KEY_ALIGNMENT_TOKENS

# Tiles of K, and of V, in shared memory: one in use, two being loaded. With 128 dimensions a program takes 193 of
# 227 KiB; a second program would not fit anyway, for lack of registers. Two and four stages compile as well; none of
# these numbers is measured.
_NUM_STAGES = 3

_TMA_ALIGNMENT_BYTES = 16  # of addresses and strides


def supports(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int, tile_rows: int = TILE_ROWS
) -> bool:
    """Return whether `launch` supports these dtypes and sizes, on a GPU that has TMA.

    It does not support 256 dimensions, which spill, nor quantized pools: their scales are stored between the values, so
    the blocks are not rows of one matrix.

    Args:
        dtype: dtype of the queries.
        kv_dtype: dtype of the pool.
        head_dim: dimension of a head.
        block_size: tokens per block; a tile of keys must lie inside one block.
        tile_rows: rows of the plan's tiles.
    """
    return (
        dtype in (torch.bfloat16, torch.float16)
        and kv_dtype == dtype
        and 32 < head_dim <= 128
        and head_dim * dtype.itemsize % _TMA_ALIGNMENT_BYTES == 0
        and block_size % _TILE_KEYS == 0
        and tile_rows == TILE_ROWS
    )


def launch(
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
    """Compute each item of the plan, and write it into the output or into the partial results.

    The queries are copied first; see `pack_queries`.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`, bfloat16 or float16.
        pool: the K/V, in the same dtype.
        layer: index into the pool's layers.
        batch: the token rows of the step.
        plan: the plan of that step.
        output: contiguous, like `query`; written.
        partials: memory for the plan's partial results; written.
        scale, softcap: from `base_2`.
        sinks: see `Scoring`.
    """
    num_tokens, _, head_dim = query.shape
    num_kv_heads = pool.num_kv_heads
    packed = pack_queries(query, plan.joined_rows, num_kv_heads)
    triton.set_allocator(_allocate)  # Triton has one allocator per thread
    _attend_tile_specialized[(plan.work.shape[0], num_kv_heads)](
        packed,
        pool.values,
        output,
        partials.rows,
        partials.lses,
        batch.block_tables,
        plan.work,
        plan.joined_rows,
        num_tokens,
        packed.shape[1],
        pool.values.numel() // head_dim,
        batch.block_tables.stride(0),
        pool.block_strides[0] // head_dim,
        layer,
        plan.window,
        scale,
        softcap,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=plan.group_size,
        BLOCK_SIZE=pool.block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        TILE_ROWS=TILE_ROWS,
        TILE_KEYS=_TILE_KEYS,
        num_warps=4,
        num_stages=_NUM_STAGES,
        enable_fp_fusion=True,  # triton's default changes with 3.10
    )


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Allocate memory for the descriptors that the programs of a launch create. Torch aligns it to 512 bytes."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


# Triton would compile several kernels for different values of these arguments, and their bits might differ.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "num_tokens",
        "num_packed_rows",
        "num_pool_rows",
        "table_stride",
        "block_rows",
        "layer",
        "window",
    ]
)
def _attend_tile_specialized(  # type: ignore[no-untyped-def]
    packed,
    values,
    output,
    partials,
    partial_lses,
    block_tables,
    work,
    joined_rows,
    num_tokens,
    num_packed_rows,
    num_pool_rows,
    table_stride,
    block_rows,
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
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Compute one work item of the plan for one KV head: attention of a tile of packed rows to a range of keys.

    The pool is read as a matrix with one vector per row. Row numbers fit into int32 on any GPU that has TMA.
    """
    item = work + tl.program_id(0) * 8
    kv_head = tl.program_id(1)
    request = tl.load(item)
    first_token = tl.load(item + 1)
    num_request_tokens = tl.load(item + 2)
    prefix_len = tl.load(item + 3)
    first_row = tl.load(item + 4)
    kv_start = tl.load(item + 5)
    kv_end = tl.load(item + 6)
    partial = tl.load(item + 7)

    rows = first_row + tl.arange(0, TILE_ROWS)
    is_joined = rows < tl.where(first_token < 0, num_request_tokens, 0)
    query_positions = (prefix_len + tl.where(is_joined, 0, rows // GROUP_SIZE))[:, None]
    dims = tl.arange(0, PADDED_DIM)
    is_dim = (dims < HEAD_DIM)[None, :]

    table = block_tables + request.to(tl.int64) * table_stride
    first_key = (layer * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE  # rows from the beginning of a block
    V_ROWS: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE  # from a key to its value
    last_block_row = tl.load(table + (kv_end - 1) // BLOCK_SIZE) * block_rows + first_key
    end_of_values = last_block_row + V_ROWS + (kv_end - 1) % BLOCK_SIZE + 1

    # TMA fills the part of a tile past the end of its matrix with 0: dimensions, and in `last_values` also slots. Slots
    # past the end may contain NaN, and 0 * NaN is NaN.
    queries = tl.make_tensor_descriptor(
        packed, [NUM_KV_HEADS * num_packed_rows, HEAD_DIM], [HEAD_DIM, 1], [TILE_ROWS, PADDED_DIM]
    )
    vectors = tl.make_tensor_descriptor(values, [num_pool_rows, HEAD_DIM], [HEAD_DIM, 1], [TILE_KEYS, PADDED_DIM])
    last_values = tl.make_tensor_descriptor(values, [end_of_values, HEAD_DIM], [HEAD_DIM, 1], [TILE_KEYS, PADDED_DIM])

    # The last tile of a request extends into the rows of other requests, whose results are not stored.
    packed_row = kv_head * num_packed_rows + tl.where(first_token < 0, num_tokens, first_token) * GROUP_SIZE + first_row
    q = queries.load([packed_row, 0])  # [TILE_ROWS, PADDED_DIM]
    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    keys = tl.arange(0, TILE_KEYS)
    for tile_start in tl.range(kv_start, kv_end, TILE_KEYS, warp_specialize=True):
        key_row = tl.load(table + tile_start // BLOCK_SIZE) * block_rows + first_key + tile_start % BLOCK_SIZE
        k = vectors.load([key_row, 0])
        scores = tl.dot(q, k.T)  # [TILE_ROWS, TILE_KEYS]
        # Positions relative to the tile need a subtraction per row instead of per key.
        weights, row_max, row_sum, rescale = softmax_step(
            scores, keys, query_positions - tile_start, row_max, row_sum, window, scale, softcap
        )
        tile_values = vectors
        if tile_start + TILE_KEYS > kv_end:
            tile_values = last_values
        v = tile_values.load([key_row + V_ROWS, 0])
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None])

    # Each item writes to one of two places, chosen by masks. With a branch, the compiler would not assign the roles.
    safe_sum = tl.where(row_sum > 0, row_sum, 1.0)
    acc = acc / safe_sum[:, None]
    num_rows = tl.where(first_token < 0, num_request_tokens, num_request_tokens * GROUP_SIZE)
    out_rows = (first_token + rows // GROUP_SIZE).to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + kv_head * GROUP_SIZE
    out_offsets = (out_rows + rows % GROUP_SIZE) * HEAD_DIM
    is_whole = (rows < tl.where(partial < 0, num_rows, 0))[:, None] & is_dim
    attended = acc
    if sinks is not None:
        attended = (
            acc * keys_share(row_max + tl.log2(safe_sum), sinks, kv_head * GROUP_SIZE + rows % GROUP_SIZE)[:, None]
        )
    tl.store(output + out_offsets[:, None] + dims[None, :], attended.to(output.dtype.element_ty), mask=is_whole)
    is_split = rows < tl.where(partial < 0, 0, num_rows)
    part_rows = partial_rows(joined_rows + rows * 3, is_joined, partial, TILE_ROWS).to(tl.int64)
    part_rows = part_rows * NUM_KV_HEADS + kv_head
    tl.store(partial_lses + part_rows, row_max + tl.log2(safe_sum), mask=is_split)  # -inf if no key was visible
    tl.store(partials + part_rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_split[:, None] & is_dim)


_PROGRAM_ROWS = 32


def pack_queries(query: torch.Tensor, joined_rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Copy the queries so that the rows of each KV head are contiguous: all its packed rows, then the joined rows.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]` with a contiguous last dimension.
        joined_rows: int32 `[num_joined_rows, 3]`, see `AttentionPlan`.
        num_kv_heads: KV heads, a divisor of `num_query_heads`.

    Returns:
        `[num_kv_heads, num_tokens * group_size + num_joined_rows, head_dim]`, new and contiguous.
    """
    num_tokens, num_query_heads, head_dim = query.shape
    group_size = num_query_heads // num_kv_heads
    num_rows = num_tokens * group_size + len(joined_rows)
    packed = query.new_empty(num_kv_heads, num_rows, head_dim)
    _pack_rows[(triton.cdiv(num_rows, _PROGRAM_ROWS), num_kv_heads)](
        query,
        packed,
        joined_rows,
        num_tokens * group_size,
        num_rows,
        query.stride(0),
        query.stride(1),
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        PROGRAM_ROWS=_PROGRAM_ROWS,
        num_warps=4,
        enable_fp_fusion=True,  # triton's default changes with 3.10
    )
    return packed


@triton.jit(do_not_specialize=["num_own_rows", "num_rows"])  # type: ignore[untyped-decorator]
def _pack_rows(  # type: ignore[no-untyped-def]
    query,
    packed,
    joined_rows,
    num_own_rows,
    num_rows,
    token_stride,
    head_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
):
    """Copy some rows of one KV head."""
    rows = tl.program_id(0) * PROGRAM_ROWS + tl.arange(0, PROGRAM_ROWS)
    kv_head = tl.program_id(1)
    is_row = rows < num_rows
    joined = tl.load(joined_rows + (rows - num_own_rows) * 3, mask=is_row & (rows >= num_own_rows), other=0)
    sources = tl.where(rows < num_own_rows, rows, joined)
    dims = tl.arange(0, PADDED_DIM)
    is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (kv_head * GROUP_SIZE + sources % GROUP_SIZE).to(tl.int64)
    offsets = (sources // GROUP_SIZE).to(tl.int64) * token_stride + heads * head_stride
    numbers = tl.load(query + offsets[:, None] + dims[None, :], mask=is_number, other=0.0)
    packed_rows = kv_head.to(tl.int64) * num_rows + rows
    tl.store(packed + packed_rows[:, None] * HEAD_DIM + dims[None, :], numbers, mask=is_number)
