"""Calls the attention of `attention.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.attention_work import AttentionWork
from radixkv.kernels.native.library import KINDS
from radixkv.kernels.scoring import Scoring

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

Attend = Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]


class _Problem(ctypes.Structure):
    """`Problem` of attention.cpp: all that layers have in common. Strides are counted in numbers."""

    _fields_ = (
        *((name, _POINTER) for name in ("tokens", "positions", "blocks", "steps", "items")),
        *((name, _INT) for name in ("num_items", "most_rows")),
        *((name, _INT) for name in ("num_kv_heads", "group_size", "head_dim", "block_size")),
        *((name, _INT) for name in ("query_token_stride", "query_head_stride", "kv_head_stride", "kv_block_stride")),
        *((name, _INT) for name in ("query_kind", "kv_kind")),
        *((name, _INT) for name in ("window", "num_threads")),  # no window: 0
        *((name, _DOUBLE) for name in ("scale", "softcap")),  # no softcap: 0
    )


def reads(pool: KVPool, dtype: torch.dtype) -> bool:
    """Whether the kernel attends over a pool from queries of a dtype: none of both is quantized."""
    return pool.dtype in KINDS and dtype in KINDS


def prepare(
    library: ctypes.CDLL, query: torch.Tensor, pool: KVPool, work: AttentionWork, scoring: Scoring, num_threads: int
) -> Attend:
    """Prepare the attention of all layers like one.

    Args:
        library: of `load_library`.
        query: `[num_tokens, num_query_heads, head_dim]` of one of the layers; the others' have its shape and strides.
        pool: the K/V, which the kernel `reads`.
        work: planned for these heads, and for the window of `scoring`.
        scoring: scale, window and softcap of the layers.
        num_threads: threads that compute.

    Returns:
        A function of a layer's queries, its index in the pool, and its sinks, float32 `[num_query_heads]` or None.
        It computes `reference.paged_attention`. K and V are rounded to the dtype of the queries, and in bfloat16
        weights are rounded too, if the processor multiplies bfloat16; sums are float32. Besides the result, memory is
        needed for the rows of one item a thread. The function may be called from one thread at a time.
    """
    values, arrays = pool.values, (work.tokens, work.positions, work.blocks, work.steps, work.items)
    problem = _Problem(
        *(array.ctypes.data for array in arrays),
        *(len(work.items), work.most_rows),
        *(pool.num_kv_heads, query.shape[1] // pool.num_kv_heads, pool.head_dim, pool.block_size),
        *(query.stride(0), query.stride(1), values.stride(3), values.stride(0)),
        *(KINDS[query.dtype], KINDS[pool.dtype]),
        *(scoring.window or 0, num_threads),
        *(scoring.scale, scoring.softcap or 0.0),
    )
    attend = library.radixkv_attend
    attend.argtypes, attend.restype = (_POINTER,) * 6, None
    layer_bytes, v_bytes = (stride * values.element_size() for stride in (values.stride(1), values.stride(2)))
    first_key, first_value = values.data_ptr(), values.data_ptr() + (0 if pool.is_latent else v_bytes)
    shape, kept = query.shape, (problem, arrays)  # what the pointers point at

    def attend_layer(query: torch.Tensor, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        output = query.new_empty(shape)
        at = layer * layer_bytes
        attend(
            ctypes.byref(kept[0]),
            query.data_ptr(),
            first_key + at,
            first_value + at,
            output.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
        )
        return output

    return attend_layer
