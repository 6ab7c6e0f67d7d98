from itertools import pairwise

import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention import paged_attention
from radixkv.kernels.gpu.attention_plan import plan_attention
from radixkv.kernels.gpu.hopper_attention import pack_queries, supports
from radixkv.kernels.scoring import Scoring

from ..cases import GQA, LAYER, MHA, Heads, Step, alone, make_step, share

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TOLERANCE = {BF16: 1.6e-2, FP16: 2e-3}
SEVEN = Heads(7, 1)  # tiles of 128 rows that begin inside a token

# (prefix_lens, query_lens) for a block of 64 tokens.
RAGGED = {
    "one token": ([0], [1]),
    "block minus one": ([0], [63]),
    "one block": ([0], [64]),
    "block plus one": ([0], [65]),
    "one token over a long prefix": ([190], [1]),
    "prefix of one block": ([64], [37]),
    "three requests": ([0, 83, 5], [17, 1, 150]),
}


def make(
    prefix_lens: list[int],
    query_lens: list[int],
    heads: Heads,
    device: str,
    head_dim: int = 64,
    block_size: int = 64,
    dtype: torch.dtype = BF16,
) -> Step:
    """Make a step of `cases.make_step`, by default with a shape that the kernel supports."""
    return make_step(
        prefix_lens, query_lens, heads, block_size=block_size, head_dim=head_dim, dtype=dtype, device=device
    )


def attend(
    step: Step,
    window: int | None = None,
    softcap: float | None = None,
    split_tokens: int = 4096,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    plan = plan_attention(
        step.batch,
        num_query_heads=step.query.shape[1],
        num_kv_heads=step.pool.num_kv_heads,
        dtype=step.query.dtype,
        window=window,
        tile_rows=128,
        split_tokens=split_tokens,
    )
    inputs = (step.query, step.pool, LAYER, step.batch, plan)
    return paged_attention(*inputs, Scoring(0.1, window, softcap, sinks), is_specialized=True)


def assert_matches_reference(
    step: Step,
    window: int | None = None,
    softcap: float | None = None,
    split_tokens: int = 4096,
    sinks: torch.Tensor | None = None,
) -> None:
    got = attend(step, window, softcap, split_tokens, sinks)
    inputs = (step.query, step.pool, LAYER, step.batch)
    expected = reference.paged_attention(*inputs, Scoring(0.1, window, softcap, sinks))
    assert (got.dtype, got.shape) == (step.query.dtype, step.query.shape)
    assert got.is_contiguous()
    assert (got.float() - expected.float()).abs().max() < TOLERANCE[step.query.dtype]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("window", "split_tokens"), [(None, 4096), (None, 128), (70, 128)])
def test_a_sink_is_counted_once_for_all_splits(window: int | None, split_tokens: int, kernel_device: str) -> None:
    step = make([200, 0], [20, 70], GQA, device=kernel_device)
    sinks = torch.linspace(-3, 6, GQA.num_query_heads, device=kernel_device)
    assert_matches_reference(step, window, split_tokens=split_tokens, sinks=sinks)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("heads", [MHA, GQA, SEVEN], ids=["MHA", "GQA", "group of 7"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_matches_reference_on_ragged_batches(
    lengths: tuple[list[int], list[int]], heads: Heads, kernel_device: str
) -> None:
    assert_matches_reference(make(*lengths, heads, kernel_device))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [(BF16, 40, 64), (FP16, 64, 64), (FP16, 80, 128), (BF16, 128, 64), (BF16, 128, 128)],
)
def test_every_head_dim_and_block_size(dtype: torch.dtype, head_dim: int, block_size: int, kernel_device: str) -> None:
    assert_matches_reference(make([70, 0], [37, 140], GQA, kernel_device, head_dim, block_size, dtype))


@pytest.mark.parametrize(("split_tokens", "window"), [(64, None), (64, 40), (128, 1), (128, 64), (128, 100)])
def test_split_tiles_are_merged(split_tokens: int, window: int | None, kernel_device: str) -> None:
    # The long suffix makes tiles whose early splits only some of the rows can see.
    step = make([150, 0, 30], [1, 37, 80], GQA, kernel_device)
    assert_matches_reference(step, window, split_tokens=split_tokens)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap_bounds_the_scores(softcap: float, window: int | None, kernel_device: str) -> None:
    step = make([37, 0], [40, 70], GQA, kernel_device)
    step.query.mul_(4)  # scores so large that the cap changes them
    assert_matches_reference(step, window, softcap, split_tokens=64)


def test_query_may_be_a_view_with_heads_first(kernel_device: str) -> None:
    step = make([5, 0], [20, 3], GQA, kernel_device)
    heads_first = Step(step.query.transpose(0, 1).contiguous().transpose(0, 1), step.pool, step.batch)
    assert not heads_first.query.is_contiguous()
    assert_matches_reference(heads_first)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("prefix_len", [1, 77, 163])
def test_fixed_tiles_and_splits_give_the_same_bits_cold_and_warm(
    prefix_len: int, window: int | None, kernel_device: str
) -> None:
    cold = make([0, 0], [20, 180], Heads(2, 1), kernel_device)
    table = cold.batch.block_tables[1].cpu().numpy()
    warm_batch = PagedBatch.build([180 - prefix_len], [180], [table], 64, kernel_device)
    warm = Step(cold.query[20 + prefix_len :], cold.pool, warm_batch)
    assert torch.equal(
        attend(warm, window, split_tokens=128), attend(cold, window, split_tokens=128)[20 + prefix_len :]
    )


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("heads", "dtype", "head_dim", "softcap"),
    [(MHA, BF16, 64, None), (GQA, FP16, 80, 0.5), (SEVEN, BF16, 40, None), (SEVEN, BF16, 128, None)],
)
def test_joined_rows_attend_to_what_their_requests_share(
    heads: Heads, dtype: torch.dtype, head_dim: int, softcap: float | None, kernel_device: str
) -> None:
    """There are two levels of sharing, and a long suffix of which only the last tile is joined."""
    step = make([300, 170, 270, 5], [1, 19, 3, 1], heads, kernel_device, head_dim, dtype=dtype)
    step = share(step, {1: (0, 2), 2: (0, 4)})
    assert_matches_reference(step, softcap=softcap, split_tokens=64)
    together = attend(step, softcap=softcap, split_tokens=64)
    for request, (start, end) in enumerate(pairwise(step.batch.query_starts)):
        assert torch.equal(attend(alone(step, request), softcap=softcap, split_tokens=64), together[start:end])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "block_size", "is_supported"),
    [
        (BF16, BF16, 128, 64, True),
        (FP16, FP16, 64, 128, True),
        (BF16, BF16, 40, 64, True),
        (BF16, BF16, 32, 64, False),
        (BF16, BF16, 100, 64, False),  # vectors of 200 bytes
        (BF16, BF16, 256, 64, False),
        (BF16, BF16, 128, 32, False),
        (FP32, FP32, 128, 64, False),
        (FP32, BF16, 128, 64, False),
        (BF16, FP8, 128, 64, False),
    ],
)
def test_supported_shapes_and_dtypes(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int, is_supported: bool
) -> None:
    assert supports(dtype, kv_dtype, head_dim, block_size) == is_supported
    assert not supports(dtype, kv_dtype, head_dim, block_size, tile_rows=64)


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"warp-specialized kernel does not support .* 16 tokens per block"):
        attend(make([0], [5], GQA, "cpu", block_size=16))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(2, 3), (1, 7), (2, 1)])
@pytest.mark.parametrize("is_heads_first", [False, True])
@pytest.mark.parametrize("num_joined", [0, 1, 40])
def test_rows_of_a_kv_head_follow_each_other_and_then_the_joined_ones(
    num_joined: int, is_heads_first: bool, num_kv_heads: int, group_size: int, kernel_device: str
) -> None:
    num_tokens, head_dim = 17, 40
    query = torch.randn(num_tokens, num_kv_heads * group_size, head_dim, device=kernel_device)
    joined_rows = torch.randint(num_tokens * group_size, (num_joined, 3), dtype=torch.int32, device=kernel_device)
    strided_query = query.transpose(0, 1).contiguous().transpose(0, 1) if is_heads_first else query
    packed = pack_queries(strided_query, joined_rows, num_kv_heads)
    own = query.view(num_tokens, num_kv_heads, group_size, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    assert packed.is_contiguous()
    assert torch.equal(packed, torch.cat((own, own[:, joined_rows[:, 0].long()]), dim=1))
