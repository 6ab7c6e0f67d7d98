from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import JOINED, AttentionPlan, fitting_tile_rows, plan_attention, tile_rows_for

from ..cases import GQA, MHA, Step, make_step, share


class WorkItem(NamedTuple):
    """A row of `AttentionPlan.work` without joined rows; see there."""

    request: int
    first_token: int
    num_tokens: int
    prefix_len: int
    first_row: int
    first_key: int
    end_key: int
    first_partial_row: int


def work_items(plan: AttentionPlan) -> list[WorkItem]:
    return [WorkItem(*row) for row in plan.work.tolist()]


def items_by_tile(plan: AttentionPlan) -> dict[tuple[int, int], list[WorkItem]]:
    """Group the plan's items by (request, first row), each group in key order."""
    tiles: dict[tuple[int, int], list[WorkItem]] = {}
    for item in sorted(work_items(plan), key=lambda item: item.first_key):
        tiles.setdefault((item.request, item.first_row), []).append(item)
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
            assert all(before.end_key == after.first_key for before, after in pairwise(items))
            first_visible_key = 0 if window is None else max(0, position + 1 - window)
            assert items[0].first_key <= first_visible_key
            assert position < items[-1].end_key <= prefix_len + query_len
            for item in items:
                assert item.first_token == step.batch.query_starts[request]
                assert (item.num_tokens, item.prefix_len) == (query_len, prefix_len)


@pytest.mark.parametrize("window", [None, 100])
def test_keys_are_cut_at_multiples_of_the_split_size(window: int | None) -> None:
    step = make_step([0, 300], [37, 50], GQA)
    plan = plan_of(step.batch, 6, window=window, split_tokens=128)
    for items in items_by_tile(plan).values():
        assert items[0].first_key % 64 == 0
        assert all(item.first_key % 128 == 0 for item in items[1:])
        assert all(item.end_key - item.first_key <= 128 for item in items)
    assert any(len(items) > 1 for items in items_by_tile(plan).values())


def key_ranges(batch: PagedBatch, request: int) -> dict[int, list[tuple[int, int]]]:
    """Return the ranges of keys of the splits of each tile of a request, by the first row of the tile."""
    plan = plan_of(batch, 6, tile_rows=16, split_tokens=128)
    return {
        first_row: [(item.first_key, item.end_key) for item in items]
        for (owner, first_row), items in items_by_tile(plan).items()
        if owner == request
    }


def test_a_fixed_plan_reads_the_same_keys_whatever_the_batch() -> None:
    alone = make_step([300], [50], GQA).batch
    among_others = make_step([2000, 300, 0], [500, 50, 1], GQA).batch
    assert key_ranges(alone, 0)
    assert key_ranges(alone, 0) == key_ranges(among_others, 1)


def written_rows(plan: AttentionPlan) -> list[int]:
    """List the rows of partial results that the items of a plan write."""
    rows: list[int] = []
    for item in work_items(plan):
        if item.first_token == JOINED:
            # These columns have another meaning: the range of joined rows, and the index of the split.
            first_joined_row, end_joined_row, split = item.first_row, item.num_tokens, item.first_partial_row
            for _, row_in_first_partial, num_tile_rows in plan.joined_rows[first_joined_row:end_joined_row].tolist():
                rows.append(row_in_first_partial + split * num_tile_rows)
        elif item.first_partial_row >= 0:
            num_rows = min(plan.tile_rows, item.num_tokens * plan.group_size - item.first_row)
            rows += range(item.first_partial_row, item.first_partial_row + num_rows)
    return rows


@pytest.mark.parametrize("is_shared", [False, True])
def test_each_partial_result_is_written_once_and_merged_once(is_shared: bool) -> None:
    step = make_step([0, 300, 130], [37, 5, 130], GQA)  # after its full tiles, 6 rows of the last request remain
    step = share(step, {2: (1, 8)}) if is_shared else step
    plan = plan_of(step.batch, 6, split_tokens=64)
    assert bool(len(plan.joined_rows)) == is_shared
    assert sorted(written_rows(plan)) == list(range(plan.num_partial_rows))
    merged: list[int] = []
    for _, num_tokens, first_row, first_partial_row, num_partials in plan.merges.tolist():
        assert num_partials > 1
        num_rows = min(plan.tile_rows, num_tokens * 3 - first_row)
        merged += range(first_partial_row, first_partial_row + num_partials * num_rows)
    assert sorted(merged) == list(range(plan.num_partial_rows))


def test_partial_results_are_in_the_order_of_keys() -> None:
    step = make_step([0, 300, 130], [37, 5, 200], GQA)
    plan = plan_of(step.batch, 6, split_tokens=64)
    tiles = items_by_tile(plan)
    assert any(len(items) == 1 for items in tiles.values())
    assert all(items[0].first_partial_row == -1 for items in tiles.values() if len(items) == 1)
    split_tiles = {
        (items[0].first_token, items[0].num_tokens, items[0].first_row): items
        for items in tiles.values()
        if len(items) > 1
    }
    assert len(split_tiles) == len(plan.merges)
    for first_token, num_tokens, first_row, first_partial_row, num_partials in plan.merges.tolist():
        num_rows = min(plan.tile_rows, num_tokens * 3 - first_row)
        expected = [first_partial_row + index * num_rows for index in range(num_partials)]
        items = split_tiles[first_token, num_tokens, first_row]
        assert [item.first_partial_row for item in items] == expected


def test_window_keeps_old_keys_out_of_the_plan() -> None:
    batch = long_step([10000], [16]).batch
    plan = plan_of(batch, 2, window=512)
    first_visible_key = 10000 + 1 - 512
    assert min(item.first_key for item in work_items(plan)) >= first_visible_key - 64


def test_longest_items_come_first() -> None:
    plan = plan_of(make_step([0, 300], [37, 50], GQA).batch, 6, split_tokens=128)
    lengths = [item.end_key - item.first_key for item in work_items(plan)]
    assert lengths == sorted(lengths, reverse=True)


def test_short_suffix_over_long_prefix_fills_the_device() -> None:
    batch = long_step([32000], [16]).batch
    plan = plan_of(batch, 32, 8)
    num_kv_heads, num_multiprocessors = 8, 132
    assert len(plan.work) * num_kv_heads >= num_multiprocessors
    assert plan.merges.shape[0] == 1


def test_long_prefill_is_not_split() -> None:
    batch = long_step([0, 500], [4096, 2048]).batch
    plan = plan_of(batch, 32, 8)
    assert plan.num_partial_rows == 0
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


def num_keys(plan: AttentionPlan) -> int:
    """Return the number of keys that all programs of one KV head read."""
    return sum(item.end_key - item.first_key for item in work_items(plan))


def have_same_work(plan: AttentionPlan, other: AttentionPlan) -> bool:
    return (
        torch.equal(plan.work, other.work)
        and torch.equal(plan.merges, other.merges)
        and torch.equal(plan.joined_rows, other.joined_rows)
        and plan.num_partial_rows == other.num_partial_rows
    )


def decode_batch(num_requests: int, num_shared: int, num_own: int) -> PagedBatch:
    """Build a batch of requests with one new token each, which share their first `num_shared` blocks of 64 tokens."""
    step = make_step([64 * (num_shared + num_own)] * num_requests, [1] * num_requests, MHA, block_size=64, head_dim=1)
    return share(step, dict.fromkeys(range(1, num_requests), (0, num_shared))).batch


@pytest.mark.parametrize("split_tokens", [2048, None])
def test_a_shared_prefix_is_read_once_per_tile_of_joined_rows(split_tokens: int | None) -> None:
    """16 requests of 4 rows each fill 4 tiles of 16 rows, or half of one of 128."""
    batch = decode_batch(16, num_shared=64, num_own=3)
    own = 16 * (3 * 64 + 1)
    for tile_rows, num_reads in ((16, 4), (64, 1), (128, 1)):
        options: dict[str, Any] = {"tile_rows": tile_rows, "split_tokens": split_tokens}
        assert num_keys(plan_of(batch, 32, 8, **options)) == num_reads * 4096 + own
        assert num_keys(plan_of(batch, 32, 8, **options, joins=False)) == 16 * 4096 + own


def test_each_level_of_sharing_is_read_once() -> None:
    """All five requests share 128 tokens, the first three of them 640, and the last two 512."""
    step = make_step([700] * 5, [1, 9, 1, 1, 2], GQA)
    batch = share(step, {1: (0, 40), 2: (0, 40), 3: (0, 8), 4: (3, 32)}).batch
    plan = plan_of(batch, 6, tile_rows=128, split_tokens=64)
    own = 3 * (700 - 640) + 2 * (700 - 512) + 1 + 9 + 1 + 1 + 2  # of the prefixes, and the new tokens
    assert num_keys(plan) == 128 + (640 - 128) + (512 - 128) + own


@pytest.mark.parametrize("split_tokens", [64, None])
def test_full_tiles_do_not_share_reads(split_tokens: int | None) -> None:
    """16 rows fill a tile, so only the last 8 rows of one suffix and the last row of the other are joined."""
    step = share(make_step([512, 512], [24, 17], MHA, block_size=16), {1: (0, 32)})
    plan = plan_of(step.batch, 2, tile_rows=16, split_tokens=split_tokens)
    assert len(plan.joined_rows) == 9
    assert num_keys(plan) == 512 + (512 + 16) + 24 + (512 + 16) + 17


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("tile_rows", "split_tokens"), [(128, 128), (None, None)])
def test_without_sharing_the_plan_is_unchanged(
    tile_rows: int | None, split_tokens: int | None, window: int | None
) -> None:
    options: dict[str, Any] = {"tile_rows": tile_rows, "split_tokens": split_tokens, "window": window}
    for prefix_lens, query_lens in (([0, 300, 130], [37, 5, 200]), ([1000] * 20, [1] * 20)):
        step = make_step(prefix_lens, query_lens, GQA)
        plan = plan_of(step.batch, 6, **options)
        assert have_same_work(plan, plan_of(step.batch, 6, **options, joins=False))
        assert not (plan.work[:, 1] == JOINED).any()
        less_than_a_split = share(step, {1: (0, 7)})
        assert have_same_work(plan, plan_of(less_than_a_split.batch, 6, **options))


@pytest.mark.parametrize(("window", "is_joined"), [(4160, False), (4161, True)])
def test_a_window_that_hides_keys_joins_nothing(window: int, is_joined: bool) -> None:
    """Each request has 65 blocks of 64 tokens and a new token, 4,161 tokens in total."""
    plan = plan_of(decode_batch(3, num_shared=64, num_own=1), 2, window=window)
    assert bool(len(plan.joined_rows)) == is_joined


def test_a_row_has_the_same_splits_alone_and_joined() -> None:
    together = decode_batch(5, num_shared=50, num_own=40)
    plan = plan_of(together, 6, tile_rows=128, split_tokens=512)
    apart = plan_of(together, 6, tile_rows=128, split_tokens=512, joins=False)
    assert len(plan.joined_rows) == 5 * 3
    assert torch.equal(plan.merges, apart.merges)
    splits_with_joins = {(item.first_key, item.end_key) for item in work_items(plan)}
    assert splits_with_joins == {(item.first_key, item.end_key) for item in work_items(apart)}


def test_blocks_longer_than_a_split_join_nothing() -> None:
    step = share(make_step([512, 512], [1, 1], MHA, block_size=128), {1: (0, 4)})
    assert not len(plan_of(step.batch, 2, split_tokens=64).joined_rows)
    assert len(plan_of(step.batch, 2, split_tokens=128).joined_rows)


BF16 = torch.bfloat16


def batch_of(num_requests: int, num_shared: int, num_own: int, query_len: int = 1) -> PagedBatch:
    """Build a batch of requests that share `num_shared` blocks of 64 tokens, each with `num_own` further blocks."""
    shared, not_shared = np.arange(num_shared), np.arange(num_shared, num_shared + num_requests * num_own)
    tables = [np.concatenate((shared, own)).astype(np.int32) for own in np.split(not_shared, num_requests)]
    kv_lens = [64 * (num_shared + num_own)] * num_requests
    return PagedBatch.build([query_len] * num_requests, kv_lens, tables, 64)


@pytest.mark.parametrize(
    ("num_requests", "num_shared", "num_own", "tile_rows"),
    [
        (64, 128, 1, 128),
        (16, 128, 1, 64),
        (4, 128, 1, 16),
        (64, 128, 150, 16),  # larger tiles would save 15 % of the keys
        (64, 3, 1, 16),
        (64, 0, 20, 16),
    ],
)
def test_tiles_grow_with_the_rows_that_share(num_requests: int, num_shared: int, num_own: int, tile_rows: int) -> None:
    batch = batch_of(num_requests, num_shared, num_own)
    heads = {"num_query_heads": 32, "num_kv_heads": 8}
    assert tile_rows_for(batch, 4, BF16) == tile_rows
    assert plan_attention(batch, **heads, dtype=BF16).tile_rows == tile_rows
    assert plan_attention(batch, **heads, dtype=BF16, joins=False).tile_rows == 16
    assert tile_rows_for(batch, 4, BF16, window=100) == 16
    assert tile_rows_for(batch, 4, torch.float32) == 16


@pytest.mark.parametrize("query_len", [1, 4, 5, 16, 17, 60])
def test_a_tile_has_room_for_the_longest_suffix(query_len: int) -> None:
    for num_shared in (0, 50):
        batch = batch_of(3, num_shared, num_own=2, query_len=query_len)
        assert tile_rows_for(batch, 4, BF16) >= fitting_tile_rows(4 * query_len, BF16)
