from itertools import chain, pairwise
from typing import Any

import pytest
import torch

from radixkv.kernels.attention_plan import AttentionPlan, plan_attention
from radixkv.kernels.batch import PagedBatch

from .cases import GQA, MHA, Step, make_step


def items_by_tile(plan: AttentionPlan) -> dict[tuple[int, int], list[list[int]]]:
    """Group the plan's items by (request, first row), each group in key order."""
    tiles: dict[tuple[int, int], list[list[int]]] = {}
    for item in sorted(plan.work.tolist(), key=lambda item: item[5]):
        tiles.setdefault((item[0], item[4]), []).append(item)
    return tiles


def plan_of(batch: PagedBatch, num_query_heads: int, num_kv_heads: int = 2, **options: Any) -> AttentionPlan:
    """Plan for a model in bfloat16, unless the options say otherwise."""
    heads = {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads}
    return plan_attention(batch, **{**heads, "dtype": torch.bfloat16, **options})


def long_step(prefix_lens: list[int], query_lens: list[int]) -> Step:
    return make_step(prefix_lens, query_lens, MHA, block_size=64, head_dim=1)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("split_tokens", [64, 128, None])
@pytest.mark.parametrize("tile_rows", [16, 64, None])
def test_items_cover_every_visible_key_once(
    tile_rows: int | None, split_tokens: int | None, window: int | None
) -> None:
    step = make_step([0, 300, 130], [37, 5, 200], GQA)
    plan = plan_of(step.batch, 6, window=window, tile_rows=tile_rows, split_tokens=split_tokens)
    tiles = items_by_tile(plan)
    for request, (prefix_len, query_len) in enumerate([(0, 37), (300, 5), (130, 200)]):
        for row in range(query_len * 3):
            position = prefix_len + row // 3
            items = tiles[request, row // plan.tile_rows * plan.tile_rows]
            assert all(before[6] == after[5] for before, after in pairwise(items))
            first_seen = 0 if window is None else max(0, position + 1 - window)
            assert items[0][5] <= first_seen
            assert position < items[-1][6] <= prefix_len + query_len
            assert {tuple(item[1:4]) for item in items} == {(step.batch.query_starts[request], query_len, prefix_len)}


@pytest.mark.parametrize("window", [None, 100])
def test_keys_are_cut_at_multiples_of_the_split_size(window: int | None) -> None:
    step = make_step([0, 300], [37, 50], GQA)
    plan = plan_of(step.batch, 6, window=window, split_tokens=128)
    for items in items_by_tile(plan).values():
        assert items[0][5] % 64 == 0
        assert all(item[5] % 128 == 0 for item in items[1:])
        assert all(item[6] - item[5] <= 128 for item in items)
    assert any(len(items) > 1 for items in items_by_tile(plan).values())


def test_a_fixed_plan_reads_the_same_keys_whatever_the_batch() -> None:
    alone = make_step([300], [50], GQA).batch
    among_others = make_step([2000, 300, 0], [500, 50, 1], GQA).batch
    plan_alone, plan_among = (plan_of(batch, 6, tile_rows=16, split_tokens=128) for batch in (alone, among_others))
    ranges_alone = {row: [item[5:7] for item in items] for (_, row), items in items_by_tile(plan_alone).items()}
    ranges_among = {
        row: [item[5:7] for item in items]
        for (request, row), items in items_by_tile(plan_among).items()
        if request == 1
    }
    assert ranges_alone == ranges_among


def test_each_partial_result_is_written_once_and_merged_once() -> None:
    step = make_step([0, 300, 130], [37, 5, 200], GQA)
    plan = plan_of(step.batch, 6, split_tokens=64)
    assert sorted(p for *_, p in plan.work.tolist() if p >= 0) == list(range(plan.num_partials))
    merged = [list(range(first, first + count)) for *_, first, count in plan.merges.tolist()]
    assert sorted(chain.from_iterable(merged)) == list(range(plan.num_partials))
    split_tiles = [items for items in items_by_tile(plan).values() if len(items) > 1]
    assert sorted(merged) == sorted([item[7] for item in items] for items in split_tiles)
    assert all(items[0][7] == -1 for items in items_by_tile(plan).values() if len(items) == 1)
    starts = {tuple(merge[:3]) for merge in plan.merges.tolist()}
    assert starts == {(items[0][1], items[0][2], items[0][4]) for items in split_tiles}


def test_window_keeps_old_keys_out_of_the_plan() -> None:
    batch = long_step([10000], [16]).batch
    plan = plan_of(batch, 2, window=512)
    assert min(item[5] for item in plan.work.tolist()) >= 10000 + 1 - 512 - 64


def test_longest_items_come_first() -> None:
    plan = plan_of(make_step([0, 300], [37, 50], GQA).batch, 6, split_tokens=128)
    lengths = [item[6] - item[5] for item in plan.work.tolist()]
    assert lengths == sorted(lengths, reverse=True)


def test_short_suffix_over_long_prefix_fills_the_device() -> None:
    batch = long_step([32000], [16]).batch
    plan = plan_of(batch, 32, 8)
    assert plan.work.shape[0] * 8 >= 132
    assert plan.merges.shape[0] == 1


def test_long_prefill_is_not_split() -> None:
    batch = long_step([0, 500], [4096, 2048]).batch
    plan = plan_of(batch, 32, 8)
    assert plan.num_partials == 0
    assert plan.merges.shape == (0, 5)


@pytest.mark.parametrize(
    ("query_len", "dtype", "tile_rows"),
    [
        (4, torch.bfloat16, 16),
        (5, torch.bfloat16, 64),
        (16, torch.float16, 64),
        (17, torch.bfloat16, 128),
        (999, torch.float32, 16),
    ],
)
def test_tile_fits_the_longest_suffix(query_len: int, dtype: torch.dtype, tile_rows: int) -> None:
    batch = long_step([0, 10], [1, query_len]).batch
    assert plan_of(batch, 8, dtype=dtype).tile_rows == tile_rows


@pytest.mark.parametrize("num_query_heads", [0, 1, 5])
def test_query_heads_must_be_a_multiple_of_kv_heads(num_query_heads: int) -> None:
    with pytest.raises(ValueError, match="num_query_heads: expected a multiple of 2"):
        plan_of(long_step([0], [1]).batch, num_query_heads)


@pytest.mark.parametrize("split_tokens", [0, -64, 100])
def test_splits_must_keep_key_tiles_whole(split_tokens: int) -> None:
    with pytest.raises(ValueError, match="split_tokens: expected a positive multiple of 64"):
        plan_of(long_step([0], [1]).batch, 2, split_tokens=split_tokens)
