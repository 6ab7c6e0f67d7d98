"""Attention in C++ is compared with the reference, and with itself in other batches."""

import ctypes
import itertools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cancelling_inputs import CANCELLING_SCALE, sensitive_attention
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.attention import Attention, Queries, supports
from radixkv.kernels.native.attention_work import plan_work
from radixkv.kernels.scoring import Scoring

from ..cases import GQA, LAYER, MHA, MQA, RAGGED, Heads, Step, alone, cut, make_step, share

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
GROUP_OF_7 = Heads(7, 1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Attend = Callable[[torch.Tensor, KVPool, PagedBatch, Scoring], torch.Tensor]


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def attend(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Attend:
    def attend(query: torch.Tensor, pool: KVPool, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        group_size, threads = query.shape[1] // pool.num_kv_heads, request.param
        work = plan_work(
            batch,
            group_size=group_size,
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
            window=scoring.window,
            num_threads=threads,
        )
        sinks = None if scoring.sinks is None else scoring.sinks.float()
        return Attention(library, Queries.of(query), pool, work, scoring, threads)(query, LAYER, sinks)

    return attend


def error_against_reference(attend: Attend, step: Step, **options: Any) -> float:
    scoring = Scoring(0.9 * step.query.shape[-1] ** -0.5, **options)
    expected = reference.paged_attention(step.query, step.pool, LAYER, step.batch, scoring)
    got = attend(step.query, step.pool, step.batch, scoring)
    assert got.dtype == step.query.dtype
    assert got.shape == step.query.shape
    assert torch.isfinite(expected).all()
    return (got.float() - expected.float()).abs().max().item()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("heads", [MHA, GQA, MQA], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_matches_reference_on_ragged_batches(
    lengths: tuple[list[int], list[int]], heads: Heads, attend: Attend
) -> None:
    assert error_against_reference(attend, make_step(*lengths, heads)) < TOLERANCE[torch.float32]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("is_adjacent", [True, False], ids=["by layer", "by block"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [GQA, GROUP_OF_7], ids=["GQA", "group of 7"])
def test_matches_reference_over_long_prefixes(
    heads: Heads, dtype: torch.dtype, is_adjacent: bool, attend: Attend
) -> None:
    step = make_step([1000, 511, 0, 700, 1300], [300, 2, 70, 1, 17], heads, dtype=dtype, is_adjacent=is_adjacent)
    assert error_against_reference(attend, step) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [1, 4, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_size_may_differ_from_the_read_size(dtype: torch.dtype, block_size: int, attend: Attend) -> None:
    step = make_step([200, 63], [37, 130], GQA, dtype=dtype, block_size=block_size)
    assert error_against_reference(attend, step) < TOLERANCE[dtype]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("head_dim", [2, 17, 37, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_may_have_awkward_sizes(dtype: torch.dtype, head_dim: int, attend: Attend) -> None:
    step = make_step([100], [37], GQA, dtype=dtype, head_dim=head_dim)
    assert error_against_reference(attend, step) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_reads_pools_of_other_dtypes(kv_dtype: torch.dtype, dtype: torch.dtype, attend: Attend) -> None:
    step = make_step([37, 600], [20, 70], GQA, dtype=dtype, kv_dtype=kv_dtype)
    assert supports(step.pool, dtype)
    assert error_against_reference(attend, step) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8, torch.int4], ids=str)
def test_reports_that_it_does_not_support_quantized_pools(kv_dtype: torch.dtype) -> None:
    assert not supports(make_step([3], [1], MHA, kv_dtype=kv_dtype).pool, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_keys_and_values(dtype: torch.dtype, attend: Attend) -> None:
    step = make_step([1000, 0, 600], [70, 37, 1], GROUP_OF_7, dtype=dtype, head_dim=576, is_latent=True)
    assert error_against_reference(attend, step) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_is_added_to_the_softmax_denominator_once(
    dtype: torch.dtype, window: int | None, attend: Attend
) -> None:
    step = make_step([1000, 511, 0, 700], [300, 2, 70, 1], GQA, dtype=dtype)
    sinks = torch.linspace(-3, 8, GQA.num_query_heads, dtype=dtype)
    assert error_against_reference(attend, step, window=window, sinks=sinks) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("sink", "weight_of_keys"), [(float("-inf"), 1.0), (80.0, 0.0)], ids=["sink without weight", "sink with all weight"]
)
def test_extreme_sinks_have_no_weight_or_all_of_it(sink: float, weight_of_keys: float, attend: Attend) -> None:
    step = make_step([600], [37], GQA)
    plain = attend(step.query, step.pool, step.batch, Scoring(0.2))
    got = attend(step.query, step.pool, step.batch, Scoring(0.2, sinks=torch.full((6,), sink)))
    torch.testing.assert_close(got, weight_of_keys * plain)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("window", [1, 7, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize("query_lens", [[1, 37], [80, 64]])
def test_window_counts_the_query_token(query_lens: list[int], window: int, attend: Attend) -> None:
    step = make_step([161, 0], query_lens, GQA)
    assert error_against_reference(attend, step, window=window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 9])
def test_softcap_bounds_the_scores(window: int | None, attend: Attend) -> None:
    step = make_step([37, 100], [20, 17], GQA)
    step.query.mul_(4)  # scores so large that the cap changes them
    assert error_against_reference(attend, step, softcap=2.0, window=window) < TOLERANCE[torch.float32]


def test_a_window_reads_only_the_blocks_inside_it(attend: Attend) -> None:
    step = make_step([430], [4], MHA)  # the first query sees keys from 422 on; its round starts at 384
    step.pool.blocks[step.batch.block_tables[0, :26].long()] = 0xFF
    step.pool.values[step.batch.block_tables[0, 26].long(), :, :, :, :6] = float("nan")
    assert torch.isfinite(attend(step.query, step.pool, step.batch, Scoring(1.0, window=9))).all()
    table = step.batch.host_tables.copy()
    table[0, :26] = 2**31 - 1  # ids of blocks that have been freed
    batch = PagedBatch.build([4], [434], list(table), 16)
    assert torch.isfinite(attend(step.query, step.pool, batch, Scoring(1.0, window=9))).all()


def test_extreme_score_differences_give_finite_results(attend: Attend) -> None:
    step = make_step([200], [3], GQA)
    got = attend(step.query * 1e18, step.pool, step.batch, Scoring(1e3))
    assert torch.isfinite(got).all()


def attend_in_chunks(attend: Attend, step: Step, chunk_ends: list[int], scoring: Scoring) -> torch.Tensor:
    """Return the output for a batch's only request, computed chunk by chunk; `chunk_ends` leaves out the last end."""
    chunks = []
    for start, end in itertools.pairwise([0, *chunk_ends, step.batch.num_tokens]):
        query, batch = cut(step, 0, start, end)
        chunks.append(attend(query, step.pool, batch, scoring))
    return torch.cat(chunks)


# Ends of chunks of 800 tokens: at, before and after multiples of 64, 128, 256 and 512, and elsewhere.
CHUNK_ENDS = ([1], [17, 255, 256, 257, 599], [63, 64, 512, 513], [583], [590], [127, 128, 129, 700])


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [MHA, GQA, GROUP_OF_7], ids=["MHA", "GQA", "group of 7"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"window": 300}, {"softcap": 3.0}, {"sinks": 1.0}, {"sinks": 1.0, "window": 40}]
)
def test_chunking_a_sequence_does_not_change_a_bit(
    options: dict[str, Any], heads: Heads, dtype: torch.dtype, attend: Attend
) -> None:
    step = make_step([0], [800], heads, dtype=dtype)
    if "sinks" in options:
        options = options | {"sinks": torch.linspace(-3, 6, heads.num_query_heads)}
    whole = attend_in_chunks(attend, step, [], Scoring(0.2, **options))
    for chunk_ends in CHUNK_ENDS:
        assert torch.equal(attend_in_chunks(attend, step, chunk_ends, Scoring(0.2, **options)), whole)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cancelling", ["values", "scores"])
def test_the_summation_order_does_not_depend_on_chunking(
    cancelling: Literal["values", "scores"], dtype: torch.dtype, head_dim: int, attend: Attend
) -> None:
    step = make_step([0], [800], GROUP_OF_7, head_dim=head_dim, dtype=dtype)
    query, key, value = sensitive_attention(cancelling, 800, 7, 1, head_dim)
    reference.write_kv(key.to(dtype), value.to(dtype), step.batch.slots, step.pool, LAYER)
    step = Step(query.to(dtype), step.pool, step.batch)
    whole = attend_in_chunks(attend, step, [], Scoring(CANCELLING_SCALE))
    assert whole.abs().max() > 0
    for chunk_ends in CHUNK_ENDS:
        assert torch.equal(attend_in_chunks(attend, step, chunk_ends, Scoring(CANCELLING_SCALE)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_bitwise_identical_alone_and_with_a_shared_prefix(dtype: torch.dtype, attend: Attend) -> None:
    """All requests but one share their first 4 blocks, four of them their first 20, and three their first 40."""
    step = make_step([700, 700, 703, 500, 130, 64], [1, 64, 3, 70, 1, 1], GROUP_OF_7, dtype=dtype)
    shared = share(step, {1: (0, 40), 2: (0, 43), 3: (0, 20), 5: (0, 4)})
    together = attend(shared.query, shared.pool, shared.batch, Scoring(0.2))
    for request in range(6):
        single = alone(shared, request)
        rows = slice(*shared.batch.query_starts[request : request + 2])
        assert torch.equal(together[rows], attend(single.query, single.pool, single.batch, Scoring(0.2)))


@pytest.mark.parametrize("num_shared", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_values_affect_only_their_request(dtype: torch.dtype, num_shared: int, attend: Attend) -> None:
    step = share(make_step([100, 100], [5, 5], GQA, dtype=dtype), {1: (0, num_shared)})
    clean = attend(step.query, step.pool, step.batch, Scoring(0.2))
    step.pool.values[step.batch.host_tables[1, 5], LAYER] = float("inf")
    spoiled = attend(step.query, step.pool, step.batch, Scoring(0.2))
    assert torch.equal(spoiled[:5], clean[:5])
    assert not torch.equal(spoiled[5:], clean[5:])


def test_queries_may_be_a_slice_of_wider_rows(attend: Attend) -> None:
    step = make_step([70], [40], GQA)
    wide = torch.randn(40, 10, 32)
    wide[:, 2:8] = step.query
    expected = attend(step.query, step.pool, step.batch, Scoring(0.2))
    assert torch.equal(attend(wide[:, 2:8], step.pool, step.batch, Scoring(0.2)), expected)


def test_a_layer_reads_its_own_keys(library: ctypes.CDLL) -> None:
    step = make_step([70], [5], GQA)
    step.pool.values[:, 1 - LAYER] = step.pool.values[:, LAYER].nan_to_num() * 2
    work = plan_work(step.batch, group_size=3, num_kv_heads=2, head_dim=32, window=None, num_threads=1)
    layers = Attention(library, Queries.of(step.query), step.pool, work, Scoring(0.2), 1)
    for layer in (0, 1):
        expected = reference.paged_attention(step.query, step.pool, layer, step.batch, Scoring(0.2))
        np.testing.assert_allclose(layers(step.query, layer, None), expected, atol=1e-5)
