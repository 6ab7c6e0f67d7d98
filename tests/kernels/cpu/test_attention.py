import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cancelling_inputs import CANCELLING_SCALE, sensitive_attention
from radixkv.kernels.cpu import attention, attention_plan
from radixkv.kernels.cpu.attention_plan import AttentionSpec, plan_cpu_attention
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring

from ..cases import GQA, LAYER, MHA, MQA, RAGGED, Heads, Step, attention_by_num_rows, clone, cut, make_step

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
GROUP_OF_7 = Heads(7, 1)


def attend(query: torch.Tensor, pool: KVPool, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
    groups = plan_cpu_attention(batch, AttentionSpec.of(query, pool, scoring))
    return attention.paged_attention(query, pool, LAYER, groups, scoring)


def error_against_reference(
    step: Step, *, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> float:
    scoring = Scoring(0.9 * step.query.shape[-1] ** -0.5, window, softcap, sinks)  # not torch's default scale
    expected = reference.paged_attention(step.query, step.pool, LAYER, step.batch, scoring)
    got = attend(step.query, step.pool, step.batch, scoring)
    assert got.dtype == step.query.dtype
    assert got.shape == step.query.shape
    assert torch.isfinite(expected).all()
    return (got.float() - expected.float()).abs().max().item()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("heads", [MHA, GQA, MQA], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_matches_reference_on_ragged_batches(lengths: tuple[list[int], list[int]], heads: Heads) -> None:
    assert error_against_reference(make_step(*lengths, heads)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("is_adjacent", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [GQA, GROUP_OF_7], ids=["GQA", "group of 7"])
def test_matches_reference_over_units_parts_and_tiles(heads: Heads, dtype: torch.dtype, is_adjacent: bool) -> None:
    step = make_step([1000, 511, 0, 700, 1300], [300, 2, 70, 1, 17], heads, dtype=dtype, is_adjacent=is_adjacent)
    assert error_against_reference(step) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int4], ids=str)
def test_reads_quantized_pools(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    step = make_step([37, 600], [20, 70], GQA, dtype=dtype, kv_dtype=kv_dtype)
    assert error_against_reference(step) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_adjacent", [True, False], ids=["in place", "copied"])
def test_latents_are_keys_and_values(is_adjacent: bool, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    sizes = {"dtype": dtype, "kv_dtype": kv_dtype, "head_dim": 576, "is_adjacent": is_adjacent}
    step = make_step([1000, 0, 600], [70, 37, 1], GROUP_OF_7, **sizes, is_latent=True)
    assert error_against_reference(step) < 1.5 * TOLERANCE[dtype]
    query, batch_of_last_token = cut(step, 0, 69, 70)
    alone = attend(query, step.pool, batch_of_last_token, Scoring(0.03))
    together = attend(step.query, step.pool, step.batch, Scoring(0.03))
    assert torch.equal(alone[0], together[69])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [GQA, GROUP_OF_7], ids=["GQA", "group of 7"])
def test_a_sink_is_added_to_the_softmax_denominator_once(heads: Heads, dtype: torch.dtype, window: int | None) -> None:
    step = make_step([1000, 511, 0, 700], [300, 2, 70, 1], heads, dtype=dtype)
    sinks = torch.linspace(-3, 8, heads.num_query_heads, dtype=dtype)
    assert error_against_reference(step, window=window, sinks=sinks) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("sink", "weight_of_keys"), [(float("-inf"), 1.0), (80.0, 0.0)], ids=["sink without weight", "sink with all weight"]
)
def test_extreme_sinks_have_no_weight_or_all_of_it(sink: float, weight_of_keys: float, window: int | None) -> None:
    step = make_step([600], [37], GQA)
    plain = attend(step.query, step.pool, step.batch, Scoring(0.2, window))
    got = attend(step.query, step.pool, step.batch, Scoring(0.2, window, sinks=torch.full((6,), sink)))
    torch.testing.assert_close(got, weight_of_keys * plain)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("window", [1, 7, 16, 17, 40, 1000])
@pytest.mark.parametrize("query_lens", [[1, 37], [80, 64]])
def test_window_counts_the_query_token(query_lens: list[int], window: int) -> None:
    step = make_step([61, 0], query_lens, GQA)
    assert error_against_reference(step, window=window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 9])
def test_softcap_bounds_the_scores(window: int | None) -> None:
    step = make_step([37, 0], [20, 17], GQA)
    step.query.mul_(4)  # scores so large that the cap changes them
    assert error_against_reference(step, softcap=2.0, window=window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("scoring", [{}, {"window": 50}, {"softcap": 5.0}, {"window": 50, "softcap": 5.0}], ids=str)
def test_bounded_groups_and_copies_give_the_same_result(
    scoring: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "_MAX_GROUP_ROWS", 100)
    monkeypatch.setattr(attention_plan, "_MAX_GROUP_ELEMENTS", 5000)
    monkeypatch.setattr(attention_plan, "_MAX_COPIED_TOKENS", 100)
    monkeypatch.setattr(attention, "_MAX_SOFTCAP_SCORES", 5000)
    step = make_step([13, 1100], [101, 25], GQA)
    assert error_against_reference(step, **scoring) < TOLERANCE[torch.float32]


def test_a_window_reads_only_the_blocks_inside_it() -> None:
    step = make_step([400], [4], MHA)
    # The queries at 400 to 403 are in the tile of 128 positions that begins at 384. Its first query would see keys from
    # 384 + 1 - 9 = 376 on. Rounded down to a multiple of 32, this is 352, the first key of block 22 (of 16 keys each).
    out_of_reach = step.batch.block_tables[0, :22].long()
    step.pool.blocks[out_of_reach] = 0xFF
    assert torch.isfinite(attend(step.query, step.pool, step.batch, Scoring(1.0, window=9))).all()


def attend_in_chunks(step: Step, chunk_ends: list[int], scoring: Scoring) -> torch.Tensor:
    """Return the output for a batch's only request, computed chunk by chunk.

    Args:
        step: a step with one request.
        chunk_ends: the end of each chunk but the last.
        scoring: how scores are computed.
    """
    chunks = []
    for start, end in itertools.pairwise([0, *chunk_ends, step.batch.num_tokens]):
        query, batch = cut(step, 0, start, end)
        chunks.append(attend(query, step.pool, batch, scoring))
    return torch.cat(chunks)


# Ends of chunks into which 800 tokens are cut: at, before and after the boundaries of tiles (128 tokens), parts (256)
# and units (512).
CHUNK_ENDS = ([1], [17, 255, 256, 257, 599], [63, 64, 512, 513], [583], [590], [127, 128, 129, 700])


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [MHA, GQA, MQA, GROUP_OF_7], ids=["MHA", "GQA", "MQA", "group of 7"])
@pytest.mark.parametrize(
    ("options", "has_sinks"),
    [
        ({}, False),
        ({"window": 40}, False),
        ({"window": 300}, False),
        ({"softcap": 3.0}, False),
        ({}, True),
        ({"window": 40}, True),
    ],
    ids=str,
)
def test_chunking_a_sequence_does_not_change_a_bit(
    options: dict[str, Any], has_sinks: bool, heads: Heads, dtype: torch.dtype
) -> None:
    step = make_step([0], [800], heads, dtype=dtype)
    if has_sinks:
        options = options | {"sinks": torch.linspace(-3, 6, heads.num_query_heads)}
    scoring = Scoring(0.2, **options)
    whole = attend_in_chunks(step, [], scoring)
    for chunk_ends in CHUNK_ENDS:
        assert torch.equal(attend_in_chunks(step, chunk_ends, scoring), whole)


def step_with_cancelling_sums(
    cancelling: Literal["values", "scores"], heads: Heads, dtype: torch.dtype, head_dim: int = 64
) -> Step:
    """Make a step of 800 tokens whose sums of values, or of the terms of a score, cancel.

    With other inputs, rounding to half precision hides the summation order of all but one in a million results.
    """
    step = make_step([0], [800], heads, head_dim=head_dim, dtype=dtype)
    query, key, value = sensitive_attention(cancelling, 800, heads.num_query_heads, heads.num_kv_heads, head_dim)
    reference.write_kv(key.to(dtype), value.to(dtype), step.batch.slots, step.pool, LAYER)
    return Step(query.to(dtype), step.pool, step.batch)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [Heads(4, 4), GQA, GROUP_OF_7], ids=["MHA", "GQA", "group of 7"])
@pytest.mark.parametrize("cancelling", ["values", "scores"])
def test_the_summation_order_does_not_depend_on_chunking(
    cancelling: Literal["values", "scores"], heads: Heads, dtype: torch.dtype, head_dim: int, window: int | None
) -> None:
    step = step_with_cancelling_sums(cancelling, heads, dtype, head_dim)
    whole = attend_in_chunks(step, [], Scoring(CANCELLING_SCALE, window))
    for chunk_ends in CHUNK_ENDS:
        assert torch.equal(attend_in_chunks(step, chunk_ends, Scoring(CANCELLING_SCALE, window)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cancelling", ["values", "scores"])
def test_cancelling_sums_reveal_a_changed_summation_order(
    cancelling: Literal["values", "scores"], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums_over: Literal["keys", "head_dim"] = "keys" if cancelling == "values" else "head_dim"
    monkeypatch.setattr(attention, "_fused_attention", attention_by_num_rows(sums_over))
    step = step_with_cancelling_sums(cancelling, GQA, dtype)
    chunked = attend_in_chunks(step, [799], Scoring(CANCELLING_SCALE))
    whole = attend_in_chunks(step, [], Scoring(CANCELLING_SCALE))
    assert not torch.equal(chunked, whole)


def record_attention_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.Size]]:
    """Record the shapes of the queries and the keys of each call of the fused attention.

    The queries are `[n, num_kv_heads, num_rows, padded_head_dim]` and the keys `[n, num_kv_heads, num_keys,
    padded_head_dim]`, where `n` is the number of units or of tiles.
    """
    calls: list[tuple[torch.Size, torch.Size]] = []
    fused_attention = attention._fused_attention

    def recorded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        calls.append((query.shape, key.shape))
        return fused_attention(query, key, value, **options)

    monkeypatch.setattr(attention, "_fused_attention", recorded)
    return calls


def num_keys_read(calls: Sequence[tuple[torch.Size, torch.Size]]) -> int:
    """Return the number of keys that calls read, for all rows of a call together, per KV head."""
    return sum(num_units * num_keys for _, (num_units, _, num_keys, _) in calls)


@pytest.mark.parametrize("num_tokens", [1, 17, 90])
@pytest.mark.parametrize("prefix_len", [0, 500, 1100])
@pytest.mark.parametrize("heads", [GQA, GROUP_OF_7, Heads(1, 1)], ids=["GQA", "group of 7", "a single head"])
def test_summation_lengths_are_the_same_on_all_processors(
    heads: Heads, prefix_len: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lengths are multiples of those that any processor adds up at once.

    The results are not compared, because the processor of this test may also use one order for other lengths.
    """
    calls = record_attention_shapes(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for window in (None, 300):
        step = make_step([prefix_len], [num_tokens], heads, head_dim=40, dtype=torch.bfloat16)
        assert error_against_reference(step, window=window) < TOLERANCE[torch.bfloat16]
    assert calls
    for (num_units, num_kv_heads, num_rows, head_dim), (_, _, num_keys, _) in calls:
        assert (num_rows % 16, num_keys % 32, head_dim % 32) == (0, 0, 0)
        num_matmuls = num_units * num_kv_heads
        assert num_matmuls > 1 or num_rows > 32, "the library would divide a single small matmul among threads"


def with_first_blocks(step: Step, first_blocks: Sequence[Sequence[int]]) -> Step:
    """Replace the first blocks of each request by those of its item in `first_blocks`."""
    batch = step.batch
    tables = [
        np.concatenate((blocks, table[len(blocks) :])).astype(np.int32)
        for blocks, table in zip(first_blocks, batch.host_tables, strict=True)
    ]
    sharing_batch = PagedBatch.build(batch.query_lens.tolist(), batch.kv_lens, tables, batch.block_size)
    return Step(step.query, step.pool, sharing_batch)


def step_with_shared_prompts(dtype: torch.dtype, heads: Heads, is_adjacent: bool) -> Step:
    """Make a step of six requests, of which the last shares nothing.

    The others share a system prompt of 68 blocks, 1,088 tokens, and three of them a document of 62 blocks after it.
    """
    step = make_step(
        [2300, 2150, 1300, 2305, 1110, 1200], [1, 60, 1, 5, 130, 1], heads, dtype=dtype, is_adjacent=is_adjacent
    )
    system = step.batch.host_tables[0][:68]
    with_document = step.batch.host_tables[0][:130]
    return with_first_blocks(step, [with_document, with_document, system, with_document, system, ()])


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("is_adjacent", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("heads", [GQA, GROUP_OF_7], ids=["GQA", "group of 7"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_rows_are_bitwise_identical_with_and_without_prefix_sharing(
    has_sinks: bool, dtype: torch.dtype, heads: Heads, is_adjacent: bool
) -> None:
    step = step_with_shared_prompts(dtype, heads, is_adjacent)
    sinks = torch.linspace(-3, 6, heads.num_query_heads) if has_sinks else None
    assert error_against_reference(step, sinks=sinks) < TOLERANCE[dtype]
    scoring = Scoring(0.2, sinks=sinks)
    together = attend(step.query, step.pool, step.batch, scoring)
    for request, (first, last) in enumerate(itertools.pairwise(step.batch.query_starts)):
        query, batch = cut(step, request, 0, last - first)
        assert torch.equal(attend(query, step.pool, batch, scoring), together[first:last])
        query, batch = cut(step, request, last - first - 1, last - first)
        assert torch.equal(attend(query, step.pool, batch, scoring)[0], together[last - 1])


def test_a_shared_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_attention_shapes(monkeypatch)
    step = make_step([1600] * 5, [1] * 5, GQA)
    attend(step.query, step.pool, step.batch, Scoring(0.2))
    num_keys_without_sharing = num_keys_read(calls)
    calls.clear()
    shared = with_first_blocks(step, [step.batch.host_tables[0][:100]] * 5)
    attend(shared.query, shared.pool, shared.batch, Scoring(0.2))
    # Each request has three units, and the tail [1536, 1664).
    assert num_keys_without_sharing == 5 * (3 * 512 + 128)
    assert num_keys_read(calls) == 3 * 512 + 5 * 128


def test_each_level_of_sharing_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_attention_shapes(monkeypatch)
    step = make_step([1100] * 4, [1] * 4, GQA)
    system, document = step.batch.host_tables[0][:32], step.batch.host_tables[1][32:64]
    with_document = np.concatenate((system, document))
    shared = with_first_blocks(step, [system, with_document, with_document, system])
    attend(shared.query, shared.pool, shared.batch, Scoring(0.2))
    # The system prompt once, the document once, the second unit of both requests without the document, and four tails.
    assert num_keys_read(calls) == 512 + 512 + 2 * 512 + 4 * 128


@pytest.mark.parametrize(
    ("gap_at", "units_in_place"),
    [(None, 3), (5, 2), (40, 2), (64, 3), (96, 3)],
    ids=["no gap", "in unit 0", "in unit 1", "between units 1 and 2", "after unit 2"],
)
def test_adjacent_blocks_are_read_in_place(
    gap_at: int | None, units_in_place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit of 32 blocks is copied if a gap divides its blocks, and otherwise read in place."""
    step = make_step([1800], [1], GQA, is_adjacent=True)
    table = step.batch.host_tables[0].copy()
    if gap_at is not None:
        table = np.where(table >= gap_at, table + 1, table)
        step.pool.blocks[gap_at + 1 :] = step.pool.blocks[gap_at:-1].clone()
        step.pool.blocks[gap_at] = 0xFF
    step = Step(step.query, step.pool, PagedBatch.build([1], [1801], [table], 16))
    num_copied_blocks = 0
    copy_blocks = attention._copy_blocks

    def count_and_copy(pool: KVPool, layer: int, block_ids: torch.Tensor, *options: Any) -> Any:
        nonlocal num_copied_blocks
        num_copied_blocks += len(block_ids)
        return copy_blocks(pool, layer, block_ids, *options)

    monkeypatch.setattr(attention, "_copy_blocks", count_and_copy)
    assert error_against_reference(step) < TOLERANCE[torch.float32]
    tail_blocks = 8  # of the tail [1792, 1920), which is always copied; the part [1536, 1792) is read in place
    assert num_copied_blocks == (3 - units_in_place) * 32 + tail_blocks


def test_only_written_slots_are_read() -> None:
    step = make_step([700], [30], GQA, is_adjacent=True)
    pool_of_zeros = clone(step.pool)
    pool_of_zeros.values.nan_to_num_(0.0)  # in step.pool, all slots that are not written contain NaN
    expected = attend(step.query, pool_of_zeros, step.batch, Scoring(0.2))
    assert torch.equal(attend(step.query, step.pool, step.batch, Scoring(0.2)), expected)
    assert torch.isfinite(expected).all()
