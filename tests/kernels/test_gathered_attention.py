import itertools
from typing import Any, Literal

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from radixkv.kernels import gathered_attention, reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.scoring import Scoring
from radixkv.kernels.sum_order import CANCELLING_SCALE, cancelling_attention

from .cases import GQA, LAYER, MHA, MQA, RAGGED, Heads, Step, attention_by_num_rows, make_step

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def error_against_reference(step: Step, *, window: int | None = None, softcap: float | None = None) -> float:
    scale = 0.9 * step.query.shape[-1] ** -0.5  # not what torch would take by itself
    inputs = (step.query, step.pool, LAYER, step.batch)
    expected = reference.paged_attention(*inputs, Scoring(scale, window, softcap))
    got = gathered_attention.paged_attention(*inputs, Scoring(scale, window, softcap))
    assert got.dtype == step.query.dtype
    assert got.shape == step.query.shape
    assert torch.isfinite(expected).all()
    return (got.float() - expected.float()).abs().max().item()


@pytest.mark.parametrize("heads", [MHA, GQA, MQA], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_matches_reference_on_ragged_batches(lengths: tuple[list[int], list[int]], heads: Heads) -> None:
    assert error_against_reference(make_step(*lengths, heads)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_lens", [[1, 5], [64, 70]], ids=["heads folded into rows", "heads apart"])
def test_matches_reference_in_half_precision(query_lens: list[int], dtype: torch.dtype) -> None:
    assert error_against_reference(make_step([37, 3], query_lens, GQA, dtype=dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int4], ids=str)
def test_reads_what_quantized_pools_stand_for(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    step = make_step([37, 3], [20, 70], GQA, dtype=dtype, kv_dtype=kv_dtype)
    assert error_against_reference(step) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("window", [1, 7, 16, 17, 40, 1000])
@pytest.mark.parametrize("query_lens", [[1, 37], [80, 64]], ids=["heads folded into rows", "heads apart"])
def test_window_counts_the_query_token(query_lens: list[int], window: int) -> None:
    step = make_step([61, 0], query_lens, GQA)
    assert error_against_reference(step, window=window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 9])
def test_softcap_bends_the_scores(window: int | None) -> None:
    step = make_step([37, 0], [20, 17], GQA)
    step.query.mul_(4)  # scores large enough for the cap to bite
    assert error_against_reference(step, softcap=2.0, window=window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 50])
def test_tiles_join_without_a_seam(window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_attention, "_TILE_TOKENS", 32)
    step = make_step([13, 100], [101, 25], GQA)
    assert error_against_reference(step, window=window, softcap=softcap) < TOLERANCE[torch.float32]


def test_softcap_tiles_stay_within_their_budget() -> None:
    for scores_per_token in (100, 14 * 4096, 128 * 131072, 1 << 30):
        tile_tokens = gathered_attention._softcap_tokens(scores_per_token)
        assert tile_tokens == 1 or tile_tokens * scores_per_token <= gathered_attention._SOFTCAP_SCORES


def test_window_gathers_only_the_blocks_in_reach_of_the_tile() -> None:
    step = make_step([400], [4], MHA)
    out_of_reach = step.batch.block_tables[0, :15].long()  # 0..239; the tile at 256 sees from 248 on
    step.pool.blocks[out_of_reach] = 0xFF
    got = gathered_attention.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(1.0, window=9))
    assert torch.isfinite(got).all()


def in_parts(step: Step, cuts: list[int], scoring: Scoring) -> torch.Tensor:
    """The rows of a batch's only request, some at a time."""
    (kv_len,), table = step.batch.kv_lens, step.batch.block_tables[0].numpy()
    parts = [
        gathered_attention.paged_attention(
            step.query[start:end],
            step.pool,
            LAYER,
            PagedBatch.build([end - start], [end], [table], step.batch.block_size),
            scoring,
        )
        for start, end in itertools.pairwise([0, *cuts, kv_len])
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [MHA, GQA, MQA], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"window": 300}, {"softcap": 3.0}], ids=str)
def test_a_row_has_the_same_bits_however_the_sequence_is_cut(
    options: dict[str, float], heads: Heads, dtype: torch.dtype
) -> None:
    step = make_step([0], [600], heads, dtype=dtype)
    whole = in_parts(step, [], Scoring(0.2, **options))
    for cuts in ([1], [17, 255, 256, 257, 599], [63, 64, 512, 513]):
        assert torch.equal(in_parts(step, cuts, Scoring(0.2, **options)), whole)


def with_cancelling(what: Literal["values", "scores"], heads: Heads, dtype: torch.dtype, head_dim: int = 64) -> Step:
    """600 tokens whose sums cancel. Rounding to half precision hides the order of others but once in a million."""
    step = make_step([0], [600], heads, head_dim=head_dim, dtype=dtype)
    query, key, value = cancelling_attention(what, 600, heads.num_query_heads, heads.num_kv_heads, head_dim)
    reference.write_kv(key.to(dtype), value.to(dtype), step.batch.slots, step.pool, LAYER)
    return Step(query.to(dtype), step.pool, step.batch)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [Heads(4, 4), GQA, Heads(7, 1)], ids=["MHA", "GQA", "group of 7"])
@pytest.mark.parametrize("what", ["values", "scores"])
def test_sums_are_added_up_in_the_same_order_however_the_sequence_is_cut(
    what: Literal["values", "scores"], heads: Heads, dtype: torch.dtype, head_dim: int, window: int | None
) -> None:
    step = with_cancelling(what, heads, dtype, head_dim)
    whole = in_parts(step, [], Scoring(CANCELLING_SCALE, window))
    for cuts in ([1], [17, 255, 256, 257, 599], [63, 64, 512, 513], [583], [590]):
        assert torch.equal(in_parts(step, cuts, Scoring(CANCELLING_SCALE, window)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["values", "scores"])
def test_the_order_of_sums_is_seen(
    what: Literal["values", "scores"], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums_over: Literal["keys", "head_dim"] = "keys" if what == "values" else "head_dim"
    monkeypatch.setattr(gathered_attention, "scaled_dot_product_attention", attention_by_num_rows(sums_over))
    step = with_cancelling(what, GQA, dtype)
    parts, whole = (in_parts(step, cuts, Scoring(CANCELLING_SCALE)) for cuts in ([599], []))
    assert not torch.equal(parts, whole)


@pytest.mark.parametrize("num_tokens", [1, 17, 90])
@pytest.mark.parametrize("heads", [GQA, Heads(7, 1), Heads(1, 1)], ids=["GQA", "group of 7", "a single head"])
def test_sums_have_lengths_that_processors_agree_on(
    heads: Heads, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that treats all lengths alike would not show it in its bits."""
    calls = []

    def attend(query: torch.Tensor, key: torch.Tensor, *inputs: Any, **options: Any) -> torch.Tensor:
        calls.append((query.shape, key.shape))
        return scaled_dot_product_attention(query, key, *inputs, **options)

    monkeypatch.setattr(gathered_attention, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    step = make_step([500], [num_tokens], heads, head_dim=40, dtype=torch.bfloat16)
    assert error_against_reference(step, window=300) < TOLERANCE[torch.bfloat16]
    for (_, num_matrices, num_rows, head_dim), (_, _, num_keys, _) in calls:
        assert (num_rows % 16, num_keys % 32, head_dim % 32) == (0, 0, 0)
        assert num_matrices > 1 or num_rows >= 64  # a lone small product would be shared out among threads
    assert calls
