"""Python interface of the attention kernels in `attention.cpp` and `tile_attention.cpp`."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.attention_work import AttentionWork
from radixkv.kernels.native.library import DTYPE_CODES
from radixkv.kernels.scoring import Scoring

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _ProblemStruct(ctypes.Structure):
    """`Problem` of attention.h: the arguments that layers have in common. Strides are in elements."""

    _fields_ = (
        *((name, _POINTER) for name in ("tokens", "positions", "blocks", "rounds", "items")),
        *((name, _INT) for name in ("num_items", "max_rows")),
        *((name, _INT) for name in ("num_kv_heads", "group_size", "head_dim", "block_size")),
        *((name, _INT) for name in ("query_token_stride", "query_head_stride", "kv_head_stride", "kv_block_stride")),
        *((name, _INT) for name in ("query_dtype", "kv_dtype")),
        *((name, _INT) for name in ("window", "num_threads")),  # `window` is 0 for full attention
        *((name, _DOUBLE) for name in ("scale", "softcap")),  # `softcap` is 0 for no cap
    )


def supports(pool: KVPool, query_dtype: torch.dtype) -> bool:
    """Return whether the kernels support a pool and queries of a dtype: the pool must not be quantized."""
    return pool.dtype in DTYPE_CODES and query_dtype in DTYPE_CODES


class Queries(NamedTuple):
    """The layout of a layer's queries, `[num_tokens, num_heads, head_dim]` with a contiguous last dimension.

    Attributes:
        num_tokens, num_heads, head_dim: shape.
        token_stride, head_stride: strides in elements.
        dtype: dtype of the queries.
    """

    num_tokens: int
    num_heads: int
    head_dim: int
    token_stride: int
    head_stride: int
    dtype: torch.dtype

    @classmethod
    def of(cls, query: torch.Tensor) -> Queries:
        """Return the layout of queries whose last stride is 1."""
        num_tokens, num_heads, head_dim = query.shape
        return cls(num_tokens, num_heads, head_dim, query.stride(0), query.stride(1), query.dtype)


class Attention:
    """The attention of one step, for all layers with the same shapes and scoring.

    Args:
        library: returned by `load_library`.
        queries: the layout of the queries of each layer.
        pool: the K/V, for which `supports` is true.
        work: the plan for the heads of `queries` and `pool`, and for the window of `scoring`.
        scoring: scale, window and softcap of the layers.
        num_threads: number of threads.

    Attributes:
        problem: address of the `Problem`, for other C++ functions; valid as long as this object.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        queries: Queries,
        pool: KVPool,
        work: AttentionWork,
        scoring: Scoring,
        num_threads: int,
    ) -> None:
        values = pool.values
        arrays = (work.tokens, work.positions, work.blocks, work.rounds, work.items)
        self._arrays = arrays  # keeps the memory of the pointers alive
        self._problem = _ProblemStruct(
            *(array.ctypes.data for array in arrays),
            *(len(work.items), work.max_rows),
            *(pool.num_kv_heads, queries.num_heads // pool.num_kv_heads, pool.head_dim, pool.block_size),
            *(queries.token_stride, queries.head_stride, values.stride(3), values.stride(0)),
            *(DTYPE_CODES[queries.dtype], DTYPE_CODES[pool.dtype]),
            *(scoring.window or 0, num_threads),
            *(scoring.scale, scoring.softcap or 0.0),
        )
        self.problem = ctypes.addressof(self._problem)
        self._attend = library.radixkv_attend
        self._attend.argtypes, self._attend.restype = (_POINTER,) * 6, None
        self._pool_address = values.data_ptr()
        self._layer_stride_bytes = values.stride(1) * values.element_size()
        self._value_offset_bytes = 0 if pool.is_latent else values.stride(2) * values.element_size()
        self._shape = (queries.num_tokens, queries.num_heads, queries.head_dim)

    def kv_addresses(self, layer: int) -> tuple[int, int]:
        """Return the addresses of a layer's keys and of its values."""
        key = self._pool_address + layer * self._layer_stride_bytes
        return key, key + self._value_offset_bytes

    def __call__(self, query: torch.Tensor, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """Compute `reference.paged_attention`.

        K and V are rounded to the dtype of the queries. For bfloat16 queries, softmax weights are rounded to bfloat16
        too if the processor multiplies bfloat16. Sums are float32. Besides the result, each thread needs memory for the
        rows of one work item (`AttentionWork.items`).

        Args:
            query: the queries of a layer, with the layout that was passed to the constructor.
            layer: index of the layer in the pool.
            sinks: float32 `[num_query_heads]`, or None.
        """
        output = query.new_empty(self._shape)
        self._attend(
            *(self.problem, query.data_ptr(), *self.kv_addresses(layer), output.data_ptr()),
            None if sinks is None else sinks.data_ptr(),
        )
        return output
