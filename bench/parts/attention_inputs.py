"""Inputs for attention kernels: random queries, and random K/V in the pool and as contiguous tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.parts.device_time import num_input_sets
from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_splits import HOPPER, DeviceCapacity
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import is_quantized
from radixkv.kernels.scoring import Scoring

# Rows whose scores the reference holds at once: 1 GiB of float32 for 32 heads and 32,768 keys.
_REFERENCE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of the attention of one layer."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One request: `suffix_tokens` queries after `prefix_tokens` that are cached.

    Attributes:
        kv_dtype: dtype of the pool; the queries are bfloat16.
        is_shuffled: blocks are in random order; otherwise block i of the pool is block i of the request.
        is_exact: the attention is planned as in exact mode.
        is_specialized: the warp-specialized kernel is used if it supports the case.
        is_dequantized_first: blocks of a quantized pool are dequantized before attention, not inside its kernel.
    """

    suffix_tokens: int
    prefix_tokens: int
    kv_dtype: torch.dtype = torch.bfloat16
    is_shuffled: bool = True
    is_exact: bool = False
    is_specialized: bool = False
    is_dequantized_first: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence."""
        return self.prefix_tokens + self.suffix_tokens

    def flops(self, heads: Heads) -> float:
        """FLOPs of both matmuls, over the keys that each query attends to."""
        suffix = self.suffix_tokens
        num_visible_keys = suffix * self.prefix_tokens + suffix * (suffix + 1) / 2  # summed over the queries
        return 4 * heads.num_query_heads * heads.head_dim * num_visible_keys


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Input sets of one shape, one for each of the first layers of the pool.

    Attributes:
        queries: for each layer bfloat16 `[suffix_tokens, num_query_heads, head_dim]`.
        pool: K/V of each set, and zeros in layers without a set.
        batch: batch of one request.
        keys, values: for each layer bfloat16 `[num_tokens, num_kv_heads, head_dim]`, as written into the pool; empty
            for a quantized pool, which no peer reads.
    """

    case: AttentionCase
    heads: Heads
    queries: list[torch.Tensor]
    pool: KVPool
    batch: PagedBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.heads.head_dim**-0.5)

    @property
    def num_bytes(self) -> int:
        """Minimum bytes of one set to read and write: queries, outputs, and all K/V once."""
        query_and_output_bytes = 2 * self.queries[0].numel() * self.queries[0].element_size()
        return query_and_output_bytes + self.case.num_tokens * _token_bytes(self.pool)


def make_inputs(
    case: AttentionCase, heads: Heads, cache_bytes: int, device: torch.device, *, num_layers: int = 1
) -> AttentionInputs:
    """Draw enough input sets to be larger than a cache together. The same arguments always give the same numbers.

    Args:
        case: the request.
        heads: shape of the attention of each layer.
        cache_bytes: size of the cache.
        device: device of all tensors.
        num_layers: minimum number of layers of the pool, which has more if there are more sets. Kernels are compiled
            for the strides of the pool, so with the same number they are compiled once for all cases.
    """
    torch.manual_seed(0)
    num_blocks = -(-case.num_tokens // heads.block_size)
    block_shape = (heads.num_kv_heads, heads.block_size, heads.head_dim)  # of one layer
    token_bytes = _token_bytes(KVPool.allocate(1, 1, *block_shape, dtype=case.kv_dtype))
    num_sets = num_input_sets(case.num_tokens * token_bytes, cache_bytes)
    pool = KVPool.allocate(num_blocks, max(num_sets, num_layers), *block_shape, dtype=case.kv_dtype, device=device)
    order = torch.randperm(num_blocks) if case.is_shuffled else torch.arange(num_blocks)
    table = order.to(torch.int32).numpy()
    all_tokens = PagedBatch.build([case.num_tokens], [case.num_tokens], [table], heads.block_size, device)
    batch = PagedBatch.build([case.suffix_tokens], [case.num_tokens], [table], heads.block_size, device)
    keys, values = [], []
    for layer in range(num_sets):
        kv_size = (2, case.num_tokens, heads.num_kv_heads, heads.head_dim)
        key, value = torch.randn(kv_size, dtype=torch.bfloat16, device=device).unbind()
        reference.write_kv(key, value, all_tokens.slots, pool, layer)
        if not is_quantized(case.kv_dtype):
            keys.append(key)
            values.append(value)
    query_size = (case.suffix_tokens, heads.num_query_heads, heads.head_dim)
    queries = [torch.randn(query_size, dtype=torch.bfloat16, device=device) for _ in range(num_sets)]
    return AttentionInputs(case, heads, queries, pool, batch, keys, values)


def expected_answer(inputs: AttentionInputs) -> torch.Tensor:
    """Compute the reference output for the first set, some rows at a time. Returns a tensor like its queries."""
    case, table = inputs.case, inputs.batch.block_tables[0].cpu().numpy()
    outputs = []
    for start in range(0, case.suffix_tokens, _REFERENCE_ROWS):
        end = min(start + _REFERENCE_ROWS, case.suffix_tokens)
        batch = PagedBatch.build(
            [end - start], [case.prefix_tokens + end], [table], inputs.heads.block_size, inputs.batch.slots.device
        )
        query = inputs.queries[0][start:end]
        outputs.append(reference.paged_attention(query, inputs.pool, 0, batch, Scoring(inputs.scale)))
    return torch.cat(outputs)


def capacity_of(device: torch.device, head_dim: int) -> DeviceCapacity:
    """Return how many attention programs a device runs at once; on a CPU, how many a Hopper GPU runs."""
    if device.type == "cpu":
        return HOPPER
    return DeviceCapacity(torch.cuda.get_device_properties(device).multi_processor_count, head_dim)


def worst_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the maximum error of a vector relative to its norm; at least 3e38 if an element of `got` is not finite.

    Args:
        got: `[..., head_dim]`.
        expected: the correct output, of the same shape; none of its vectors is zero.
    """
    errors = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(errors.nan_to_num(float("inf")).max())


def _token_bytes(pool: KVPool) -> int:
    """Return the bytes of K and V per token in one layer, scales included."""
    return pool.blocks.shape[1] // (pool.num_layers * pool.block_size)
