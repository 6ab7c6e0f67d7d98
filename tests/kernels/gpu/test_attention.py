import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu import joined_rows
from radixkv.kernels.gpu.attention import paged_attention
from radixkv.kernels.gpu.attention_plan import JOINED, AttentionPlan, plan_attention
from radixkv.kernels.scoring import Scoring

from ..cases import GQA, LAYER, MHA, MQA, RAGGED, Heads, Step, alone, make_step, share

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def plan_of(step: Step, **options: Any) -> AttentionPlan:
    heads = {"num_query_heads": step.query.shape[1], "num_kv_heads": step.pool.num_kv_heads}
    return plan_attention(step.batch, **{**heads, "dtype": step.query.dtype, **options})


def error_against_reference(
    step: Step,
    *,
    window: int | None = None,
    softcap: float | None = None,
    tile_rows: int | None = None,
    split_tokens: int | None = None,
    sinks: torch.Tensor | None = None,
) -> float:
    plan = plan_of(step, window=window, tile_rows=tile_rows, split_tokens=split_tokens)
    inputs, scale = (step.query, step.pool, LAYER, step.batch), step.query.shape[-1] ** -0.5
    got = paged_attention(*inputs, plan, Scoring(scale, window, softcap, sinks))
    expected = reference.paged_attention(*inputs, Scoring(scale, window, softcap, sinks))
    assert got.dtype == step.query.dtype
    assert got.shape == step.query.shape
    assert got.is_contiguous()
    return (got.float() - expected.float()).abs().max().item()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("heads", [MHA, GQA, MQA], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_matches_reference_on_ragged_batches(
    lengths: tuple[list[int], list[int]], heads: Heads, kernel_device: str
) -> None:
    step = make_step(*lengths, heads, device=kernel_device)
    assert error_against_reference(step) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_key_tiles_span_blocks_and_parts_of_blocks(dtype: torch.dtype, block_size: int, kernel_device: str) -> None:
    b = block_size
    step = make_step([0, b, 5], [b - 1, b + 1, 37], GQA, block_size=b, dtype=dtype, device=kernel_device)
    assert error_against_reference(step, tile_rows=128) < TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8, torch.int4], ids=str)
def test_reads_quantized_pools(kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, kernel_device: str) -> None:
    step = make_step([37, 0], [20, 17], GQA, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, device=kernel_device)
    tolerance = TOLERANCE[torch.bfloat16 if dtype == torch.float16 else dtype]
    assert error_against_reference(step, tile_rows=64, split_tokens=64) < tolerance


def test_a_bf16_pool_serves_float32(kernel_device: str) -> None:
    step = make_step([37, 0], [20, 17], GQA, kv_dtype=torch.bfloat16, device=kernel_device)
    assert error_against_reference(step, tile_rows=64) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_many_small_weights_times_small_scales_do_not_underflow(
    kv_dtype: torch.dtype, dtype: torch.dtype, kernel_device: str
) -> None:
    """One key has nearly all the weight and a value of 0, so the result comes from up to 503 keys of tiny weights."""
    step = make_step([500], [4], MHA, dtype=dtype, kv_dtype=kv_dtype, device=kernel_device)
    key, value = torch.zeros(504, 2, 32), torch.full((504, 2, 32), 0.1)
    key[0], value[0] = 1.0, 0.0
    slots = PagedBatch.build([504], [504], [step.batch.block_tables[0].cpu().numpy()], 16, kernel_device).slots
    reference.write_kv(key.to(kernel_device, dtype), value.to(kernel_device, dtype), slots, step.pool, LAYER)
    step.query.fill_(1.9)  # so each of the other 503 keys gets a weight of exp(-10.7)
    scale = 32**-0.5
    plan = plan_of(step, tile_rows=16)
    got = paged_attention(step.query, step.pool, LAYER, step.batch, plan, Scoring(scale)).float()
    expected = reference.paged_attention(step.query, step.pool, LAYER, step.batch, Scoring(scale)).float()
    assert 0 < expected.max() < 0.01
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_dims_other_than_powers_of_two_are_padded(head_dim: int, kernel_device: str) -> None:
    step = make_step([21, 70], [17, 1], GQA, head_dim=head_dim, dtype=torch.bfloat16, device=kernel_device)
    assert error_against_reference(step, tile_rows=64, split_tokens=64) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("tile_rows", [16, 64, 128])
@pytest.mark.parametrize("heads", [MHA, GQA, Heads(7, 1)], ids=["MHA", "GQA", "group of 7"])
def test_tiles_may_cut_a_token_in_two(heads: Heads, tile_rows: int, kernel_device: str) -> None:
    step = make_step([0, 5], [37, 10], heads, device=kernel_device)
    assert error_against_reference(step, tile_rows=tile_rows) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("split_tokens", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_results_merge_into_the_whole(dtype: torch.dtype, split_tokens: int, kernel_device: str) -> None:
    step = make_step([200, 0, 63, 61], [20, 70, 1, 5], GQA, dtype=dtype, device=kernel_device)
    assert error_against_reference(step, tile_rows=128, split_tokens=split_tokens) < TOLERANCE[dtype]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("window", "split_tokens"),
    [(1, None), (7, 64), (16, None), (17, None), (64, 64), (100, 64), (1000, None)],
)
def test_window_counts_the_query_token(window: int, split_tokens: int | None, kernel_device: str) -> None:
    # The long suffix makes tiles whose early splits only some of the rows can see.
    step = make_step([150, 0, 30], [1, 37, 80], GQA, device=kernel_device)
    error = error_against_reference(step, window=window, tile_rows=128, split_tokens=split_tokens)
    assert error < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap_bounds_the_scores(softcap: float, window: int | None, kernel_device: str) -> None:
    step = make_step([37, 0], [20, 17], GQA, device=kernel_device)
    step.query.mul_(4)  # scores so large that the cap changes them
    error = error_against_reference(step, softcap=softcap, window=window, tile_rows=64, split_tokens=64)
    assert error < 4 * TOLERANCE[torch.float32]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("window", "split_tokens"), [(None, None), (None, 64), (40, 64)])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)], ids=str
)
def test_a_sink_is_counted_once_for_all_splits(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int | None, split_tokens: int | None, kernel_device: str
) -> None:
    step = make_step([200, 0, 63], [20, 70, 1], GQA, dtype=dtype, kv_dtype=kv_dtype, device=kernel_device)
    sinks = torch.linspace(-3, 6, 6, device=kernel_device, dtype=dtype)
    error = error_against_reference(step, window=window, tile_rows=128, split_tokens=split_tokens, sinks=sinks)
    assert error < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # in the interpreter
def test_softcap_survives_scores_past_the_range_of_exp(kernel_device: str) -> None:
    step = make_step([5], [20], MHA, device=kernel_device)
    step.query.mul_(1e4)
    assert error_against_reference(step, softcap=30.0, tile_rows=64) < 1e-4


def test_query_may_be_a_view_with_heads_first(kernel_device: str) -> None:
    step = make_step([5, 0], [20, 3], GQA, device=kernel_device)
    heads_first = Step(step.query.transpose(0, 1).contiguous().transpose(0, 1), step.pool, step.batch)
    assert not heads_first.query.is_contiguous()
    assert error_against_reference(heads_first, tile_rows=64) < TOLERANCE[torch.float32]


def test_one_plan_serves_every_layer(kernel_device: str) -> None:
    step = make_step([37, 0], [20, 17], GQA, device=kernel_device)
    step.pool.values.nan_to_num_(0.5)
    step.pool.values[:, 0] = step.pool.values[:, LAYER].flip(-1)
    plan = plan_of(step, tile_rows=64)
    for layer in range(2):
        got = paged_attention(step.query, step.pool, layer, step.batch, plan, Scoring(0.2))
        expected = reference.paged_attention(step.query, step.pool, layer, step.batch, Scoring(0.2))
        torch.testing.assert_close(got, expected)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (100, False), (None, True), (100, True)])
@pytest.mark.parametrize("prefix_len", [1, 77, 163])
def test_fixed_tiles_and_splits_give_the_same_bits_cold_and_warm(
    prefix_len: int, window: int | None, has_sinks: bool, kv_dtype: torch.dtype | None, kernel_device: str
) -> None:
    sinks = torch.tensor([0.5, 4.0], device=kernel_device) if has_sinks else None
    cold = make_step([0, 0], [20, 180], Heads(2, 1), dtype=torch.bfloat16, kv_dtype=kv_dtype, device=kernel_device)
    table = cold.batch.block_tables[1].cpu().numpy()
    warm_batch = PagedBatch.build([180 - prefix_len], [180], [table], 16, kernel_device)

    def attend(query: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        plan = plan_of(Step(query, cold.pool, batch), window=window, tile_rows=16, split_tokens=128)
        return paged_attention(query, cold.pool, LAYER, batch, plan, Scoring(0.2, window, sinks=sinks))

    warm_rows = cold.query[20 + prefix_len :]
    assert torch.equal(attend(warm_rows, warm_batch), attend(cold.query, cold.batch)[20 + prefix_len :])


# Two levels of sharing: requests 0, 1 and 2 share their first 8 blocks of 16 tokens, and 0 and 2 their first 18.
# Requests 3 and 4 share their first 5.
LEVELS = {1: (0, 8), 2: (0, 18), 4: (3, 5)}


@pytest.fixture
def eager_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join rows wherever that reads fewer tiles of keys, even if it saves only a few reads per row."""
    monkeypatch.setattr(joined_rows, "_SAVED_KEYS_PER_ROW", 0.01)


def shared_step(query_lens: list[int], heads: Heads, device: str, **options: Any) -> Step:
    """Make a step of five requests of 91 to 420 tokens, which share their first blocks as `LEVELS` says."""
    prefix_lens = [300, 130, 420 - query_lens[2], 131, 90]
    return share(make_step(prefix_lens, query_lens, heads, device=device, **options), LEVELS)


@pytest.mark.sampled(one_in=3)
@pytest.mark.usefixtures("eager_joins")
@pytest.mark.parametrize("tile_rows", [16, 128])
@pytest.mark.parametrize("heads", [MHA, GQA, Heads(7, 1)], ids=["MHA", "GQA", "group of 7"])
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1, 1], [17, 1, 37, 1, 2]], ids=["decoding", "mixed"])
def test_joined_rows_attend_to_what_their_requests_share(
    query_lens: list[int], heads: Heads, tile_rows: int, kernel_device: str
) -> None:
    step = shared_step(query_lens, heads, kernel_device)
    plan = plan_of(step, tile_rows=tile_rows, split_tokens=64)
    assert (plan.work[:, 1] == JOINED).sum() >= 3
    assert error_against_reference(step, tile_rows=tile_rows, split_tokens=64) < TOLERANCE[torch.float32]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.int8, torch.int4], ids=str)
def test_joined_rows_read_every_pool(
    kv_dtype: torch.dtype | None, dtype: torch.dtype, softcap: float | None, kernel_device: str
) -> None:
    step = shared_step([1, 5, 1, 1, 2], GQA, kernel_device, dtype=dtype, kv_dtype=kv_dtype)
    tolerance = TOLERANCE[torch.bfloat16 if kv_dtype and dtype == torch.float16 else dtype]
    assert error_against_reference(step, softcap=softcap, tile_rows=64, split_tokens=128) < tolerance
    plan = plan_of(step, tile_rows=64, split_tokens=128)
    assert (plan.work[:, 1] == JOINED).sum() == 2


def test_splits_that_fit_the_batch_join_rows_too(kernel_device: str) -> None:
    step = share(make_step([700, 650, 600], [1, 3, 2], GQA, device=kernel_device), {1: (0, 40), 2: (1, 36)})
    assert len(plan_of(step).joined_rows)
    assert error_against_reference(step) < TOLERANCE[torch.float32]


def test_rows_join_if_the_window_hides_nothing(kernel_device: str) -> None:
    step = share(make_step([200, 150], [1, 1], GQA, device=kernel_device), {1: (0, 9)})
    assert len(plan_of(step, window=201, split_tokens=64).joined_rows)
    assert error_against_reference(step, window=201, split_tokens=64) < TOLERANCE[torch.float32]


@pytest.mark.sampled(one_in=3)
@pytest.mark.usefixtures("eager_joins")
@pytest.mark.parametrize("seed", range(6))
def test_fixed_tiles_and_splits_are_batch_invariant(seed: int, kernel_device: str) -> None:
    """Each of the random requests after the first begins with a random number of blocks of an earlier request."""
    rng = random.Random(seed)
    num_requests = rng.randint(2, 5)
    query_lens = [1, 1, *(rng.choice([1, 2, 17, 37]) for _ in range(num_requests - 2))]
    prefix_lens = [rng.randint(150, 300) for _ in range(num_requests)]
    heads = rng.choice([GQA, Heads(7, 1), MHA])
    kv_dtype = rng.choice([None, torch.int8])
    step = make_step(
        prefix_lens, query_lens, heads, dtype=torch.bfloat16, kv_dtype=kv_dtype, device=kernel_device, seed=seed
    )
    shared_blocks = {}
    for request in range(1, num_requests):
        source = rng.randrange(request)
        max_blocks = min(prefix_lens[request], prefix_lens[source]) // 16
        shared_blocks[request] = (source, rng.randint(8, max_blocks))
    step = share(step, shared_blocks)

    def attend(step: Step) -> torch.Tensor:
        plan = plan_of(step, tile_rows=128, split_tokens=64)
        assert bool(len(plan.joined_rows)) == (step.batch.num_requests > 1)
        return paged_attention(step.query, step.pool, LAYER, step.batch, plan, Scoring(0.2))

    together = attend(step)
    for request, (start, end) in enumerate(pairwise(step.batch.query_starts)):
        assert torch.equal(attend(alone(step, request)), together[start:end])


def test_plan_for_another_window_is_refused() -> None:
    step = make_step([0], [5], GQA)
    plan = plan_of(step, window=8)
    with pytest.raises(ValueError, match="expected one for window None, got one for window 8"):
        paged_attention(step.query, step.pool, LAYER, step.batch, plan, Scoring(1.0))


def test_plan_for_another_head_count_is_refused() -> None:
    step = make_step([0], [5], GQA)
    plan = plan_of(step, num_query_heads=4)
    with pytest.raises(ValueError, match="expected one for 6 query heads, got 4"):
        paged_attention(step.query, step.pool, LAYER, step.batch, plan, Scoring(1.0))


@pytest.mark.parametrize("is_specialized", [False, True])
def test_padding_of_a_captured_step_does_not_change_a_bit(is_specialized: bool, kernel_device: str) -> None:
    """The padding of a CUDA graph's batch has queries of its own, after those of the requests."""
    options: dict[str, Any] = {"head_dim": 64, "dtype": torch.bfloat16, "device": kernel_device}
    step = share(make_step([150, 130, 0], [5, 1, 17], GQA, block_size=64, **options), {1: (0, 2)})
    plan = plan_of(step, tile_rows=128, split_tokens=64)
    assert len(plan.joined_rows)
    padded_plan = plan.with_idle_work()
    assert len(padded_plan.work) > len(plan.work)
    assert len(padded_plan.merges) > len(plan.merges)
    assert len(padded_plan.joined_rows) > len(plan.joined_rows)
    padding = step.query.new_full((7, *step.query.shape[1:]), 100.0)

    def attend(query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        return paged_attention(query, step.pool, LAYER, step.batch, plan, Scoring(0.1), is_specialized=is_specialized)

    unpadded = attend(step.query, plan)
    padded = attend(torch.cat((step.query, padding)), padded_plan)
    assert torch.equal(padded[: len(unpadded)], unpadded)
