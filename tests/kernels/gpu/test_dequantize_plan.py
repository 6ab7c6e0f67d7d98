"""When blocks are dequantized before attention, and that the results agree with those over the quantized pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu import dequantize_plan
from radixkv.kernels.gpu.attention import paged_attention
from radixkv.kernels.gpu.attention_plan import plan_attention
from radixkv.kernels.gpu.dequantize_blocks import dequantize_blocks
from radixkv.kernels.gpu.dequantize_plan import DequantizePlan, plan_dequantize
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring

from ..cases import GQA, LAYER, MHA, Heads, Step, make_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8, INT4 = torch.float8_e4m3fn, torch.int8, torch.int4

GROUPS_OF_4 = Heads(32, 8)

# The tolerance of attention over a plain pool, plus the rounding of K and V to the dtype of the queries.
TOLERANCE = {BF16: 2.4e-2, FP16: 3e-3}


def plan_of(step: Step, **options: Any) -> DequantizePlan:
    heads = {"num_query_heads": step.query.shape[1], "dtype": step.query.dtype}
    plan = plan_dequantize(step.batch, step.pool, **heads, **options, is_forced=True)
    assert plan is not None
    return plan


def attend(
    step: Step, window: int | None = None, softcap: float | None = None, *, is_specialized: bool = False
) -> torch.Tensor:
    plan = plan_of(step, window=window)
    plain = dequantize_blocks(step.pool, LAYER, plan.block_ids, step.query.dtype)
    heads = {"num_query_heads": step.query.shape[1], "num_kv_heads": plain.num_kv_heads, "dtype": step.query.dtype}
    tiles = plan_attention(plan.batch, **heads, window=window, tile_rows=128, split_tokens=64)
    scoring = Scoring(step.pool.head_dim**-0.5, window, softcap)
    return paged_attention(step.query, plain, 0, plan.batch, tiles, scoring, is_specialized=is_specialized)


def attend_reference(step: Step, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    inputs = (step.query, step.pool, LAYER, step.batch)
    return reference.paged_attention(*inputs, Scoring(step.pool.head_dim**-0.5, window, softcap))


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert (got.float() - expected.float()).abs().max() < TOLERANCE[expected.dtype]


def with_shared_prefix(step: Step, shared_tokens: int) -> Step:
    """Let all requests begin with the first `shared_tokens` tokens of the first request."""
    batch, num_shared = step.batch, shared_tokens // step.batch.block_size
    tables = [np.concatenate((batch.host_tables[0, :num_shared], table[num_shared:])) for table in batch.host_tables]
    query_lens, device = np.diff(batch.query_starts).tolist(), batch.block_tables.device
    shared = PagedBatch.build(query_lens, batch.kv_lens, tables, batch.block_size, device)
    return Step(step.query, step.pool, shared)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kv_dtype", [FP8, INT8, INT4], ids=str)
def test_attention_over_plain_blocks_is_attention_over_the_pool(
    kv_dtype: torch.dtype, dtype: torch.dtype, block_size: int, window: int | None, kernel_device: str
) -> None:
    """Slots that are not written hold NaN, and so do the blocks before the window of the first request."""
    lengths, dtypes = ([210, 0, 130], [17, 37, 1]), {"dtype": dtype, "kv_dtype": kv_dtype}
    step = make_step(*lengths, GQA, block_size=block_size, **dtypes, device=kernel_device)
    step = with_shared_prefix(step, 0)
    expected = attend_reference(step, window)
    if window is not None:
        assert step.pool.scales is not None
        step.pool.scales[step.batch.host_tables[0, : 128 // block_size]] = float("nan")
    assert_close(attend(step, window), expected)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("kv_dtype", [FP8, INT4], ids=str)
def test_warps_may_specialize_over_plain_blocks(
    kv_dtype: torch.dtype, softcap: float | None, kernel_device: str
) -> None:
    lengths, shape = ([83, 0, 130], [17, 37, 1]), {"block_size": 64, "head_dim": 64}
    step = make_step(*lengths, GQA, **shape, dtype=BF16, kv_dtype=kv_dtype, device=kernel_device)
    assert_close(attend(step, softcap=softcap, is_specialized=True), attend_reference(step, softcap=softcap))


@pytest.mark.parametrize("block_size", [16, 64])
def test_shared_blocks_are_dequantized_once(block_size: int, kernel_device: str) -> None:
    lengths, dtypes = ([130, 130, 200], [17, 37, 5]), {"dtype": BF16, "kv_dtype": INT8}
    step = make_step(*lengths, GQA, block_size=block_size, **dtypes, device=kernel_device)
    step = with_shared_prefix(step, 128)
    plan = plan_of(step)
    shared_blocks = 128 // block_size
    own_blocks = [-(-kv_len // block_size) - shared_blocks for kv_len in step.batch.kv_lens]
    assert plan.block_ids.unique().numel() == plan.block_ids.numel() == shared_blocks + sum(own_blocks)
    for plain_table, table, kv_len in zip(
        plan.batch.block_tables, step.batch.block_tables, step.batch.kv_lens, strict=True
    ):
        num_blocks = -(-kv_len // block_size)
        assert torch.equal(plan.block_ids[plain_table[:num_blocks].long()], table[:num_blocks])
    assert_close(attend(step), attend_reference(step))


def test_a_non_finite_key_or_value_has_the_same_effect_as_in_the_pool(kernel_device: str) -> None:
    step = make_step([37, 21], [17, 20], MHA, dtype=BF16, kv_dtype=INT8, device=kernel_device)
    assert step.pool.scales is not None
    key_block, value_block = step.batch.host_tables[0, :2]
    step.pool.scales[key_block, LAYER, 0, 0, 3] = float("nan")
    step.pool.scales[value_block, LAYER, 1, 1, 3] = float("nan")
    tiles = plan_attention(step.batch, num_query_heads=2, num_kv_heads=2, dtype=BF16, tile_rows=128, split_tokens=64)
    over_quantized = paged_attention(step.query, step.pool, LAYER, step.batch, tiles, Scoring(32**-0.5))
    assert torch.equal(attend(step).isnan(), over_quantized.isnan())
    assert over_quantized[:17].isnan().all()
    assert not over_quantized[17:].isnan().any()


@pytest.mark.parametrize("kv_dtype", [FP8, INT8], ids=str)
def test_many_small_weights_do_not_underflow_in_float16(kv_dtype: torch.dtype, kernel_device: str) -> None:
    """Over a quantized pool, attention multiplies weights by scales in bfloat16. Here values contain their scales."""
    step = make_step([500], [4], MHA, dtype=FP16, kv_dtype=kv_dtype, device=kernel_device)
    key, value = torch.zeros(504, 2, 32), torch.full((504, 2, 32), 0.1)
    key[0], value[0] = 1.0, 0.0
    slots = PagedBatch.build([504], [504], [step.batch.host_tables[0]], 16, kernel_device).slots
    reference.write_kv(key.to(kernel_device, FP16), value.to(kernel_device, FP16), slots, step.pool, LAYER)
    step.query.fill_(1.9)  # so each of the other 503 keys gets a weight of exp(-10.7)
    expected = attend_reference(step).float()
    assert 0 < expected.max() < 0.01
    torch.testing.assert_close(attend(step).float(), expected, rtol=0.02, atol=0)


def dequantizes_first(
    query_lens: list[int],
    prefix_lens: list[int],
    *,
    kv_dtype: torch.dtype = INT8,
    dtype: torch.dtype = BF16,
    heads: Heads = GROUPS_OF_4,
    window: int | None = None,
    shared_tokens: int = 0,
) -> bool:
    """Return whether a step dequantizes before attention, without being forced to.

    All requests share their first `shared_tokens` tokens. By default four query heads share a KV head, so a token has
    four rows.
    """
    pool = KVPool.allocate(1, 1, heads.num_kv_heads, 64, 128, dtype=kv_dtype)
    kv_lens = [query_len + prefix_len for query_len, prefix_len in zip(query_lens, prefix_lens, strict=True)]
    tables, num_shared = [], shared_tokens // 64
    for i, kv_len in enumerate(kv_lens):
        own = np.arange(-(-kv_len // 64), dtype=np.int32) + 100_000 * (i + 1)
        tables.append(np.concatenate((np.arange(num_shared, dtype=np.int32), own[num_shared:])))
    batch = PagedBatch.build(query_lens, kv_lens, tables, 64)
    options = {"num_query_heads": heads.num_query_heads, "dtype": dtype, "window": window}
    return plan_dequantize(batch, pool, **options) is not None


@pytest.mark.parametrize("kv_dtype", [FP8, INT8, INT4], ids=str)
def test_a_long_suffix_is_dequantized_first(kv_dtype: torch.dtype) -> None:
    # From 1,600 rows per key on: here 4 * 450 = 1,800 and 4 * 350 = 1,400.
    assert dequantizes_first([450], [8192], kv_dtype=kv_dtype)
    assert not dequantizes_first([350], [8192], kv_dtype=kv_dtype)


def test_the_gain_depends_on_query_heads_per_kv_head() -> None:
    assert not dequantizes_first([512], [8192], heads=Heads(8, 8))
    assert dequantizes_first([2048], [8192], heads=Heads(8, 8))
    assert dequantizes_first([256], [8192], heads=Heads(32, 4))


def test_without_a_prefix_half_of_the_rows_attend_to_a_key() -> None:
    assert dequantizes_first([900], [0])
    assert not dequantizes_first([700], [0])


def test_keys_of_other_requests_count_as_cost() -> None:
    assert dequantizes_first([480, 1], [8192, 500])
    assert not dequantizes_first([480, 1], [8192, 8192])


def test_shared_keys_count_once() -> None:
    assert dequantizes_first(8 * [64], 8 * [8192], shared_tokens=8192)
    assert not dequantizes_first(8 * [64], 8 * [8192])


def test_with_a_window_few_rows_attend_to_a_key() -> None:
    assert not dequantizes_first([2048], [8192], window=256)
    assert dequantizes_first([2048], [8192], window=1024)


def test_at_most_128_tokens_are_never_dequantized_first() -> None:
    assert dequantizes_first([129], [8192], kv_dtype=INT4, heads=Heads(64, 1))
    assert not dequantizes_first([128], [8192], kv_dtype=INT4, heads=Heads(64, 1))
    assert not dequantizes_first([64, 64], [8192, 8192], kv_dtype=INT4, heads=Heads(64, 1))


def test_more_bytes_than_the_bound_are_not_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dequantizes_first([2048], [8192])
    bytes_per_token = 2 * 8 * 128 * 2  # K and V of 8 heads of 128 dimensions in bfloat16
    num_bytes = (2048 + 8192) * bytes_per_token
    monkeypatch.setattr(dequantize_plan, "_MAX_PLAIN_BYTES", num_bytes)
    assert dequantizes_first([2048], [8192])
    monkeypatch.setattr(dequantize_plan, "_MAX_PLAIN_BYTES", num_bytes - 1)
    assert not dequantizes_first([2048], [8192])


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (FP32, INT8), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("is_forced", [False, True])
def test_plain_pools_and_float32_are_not_dequantized(
    dtype: torch.dtype, kv_dtype: torch.dtype, is_forced: bool
) -> None:
    step = make_step([0], [2000], MHA, head_dim=2, dtype=dtype, kv_dtype=kv_dtype)
    heads = {"num_query_heads": 2, "dtype": dtype}
    assert plan_dequantize(step.batch, step.pool, **heads, is_forced=is_forced) is None
