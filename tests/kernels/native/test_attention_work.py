"""In a plan, each token attends to all of its keys once, in order, and shared keys are read together."""

import itertools
from collections import Counter

import numpy as np
import pytest

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.native.attention_work import AttentionWork, plan_work

BLOCK_SIZE = 16


def build(
    prefix_lens: list[int], query_lens: list[int], shared_blocks: int = 0, block_size: int = BLOCK_SIZE
) -> PagedBatch:
    """Build a batch of requests that share their first `shared_blocks` blocks."""
    kv_lens = [prefix + new for prefix, new in zip(prefix_lens, query_lens, strict=True)]
    tables, next_block = [], shared_blocks
    for kv_len in kv_lens:
        own_blocks = -(-kv_len // block_size) - shared_blocks
        tables.append(np.r_[0:shared_blocks, next_block : next_block + own_blocks].astype(np.int32))
        next_block += own_blocks
    return PagedBatch.build(query_lens, kv_lens, tables, block_size)


def plan(batch: PagedBatch, window: int | None = None, num_threads: int = 1, head_dim: int = 64) -> AttentionWork:
    return plan_work(batch, group_size=7, num_kv_heads=2, head_dim=head_dim, window=window, num_threads=num_threads)


def key_ranges(work: AttentionWork, index: int) -> list[tuple[int, int]]:
    """Return the ranges of keys that the token at `index` in `work.tokens` attends to, in order."""
    return [
        (first_key, end_key)
        for first_token, end_token, first_key, end_key, *_ in work.rounds.tolist()
        if first_token <= index < end_token
    ]


@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
def test_each_token_attends_to_all_its_keys_once_in_order(block_size: int) -> None:
    batch = build([1000, 700, 0, 130, 64], [3, 200, 70, 1, 1], block_size=block_size)
    work = plan(batch)
    assert sorted(work.tokens.tolist()) == list(range(batch.num_tokens))
    for index, (token, position) in enumerate(zip(work.tokens, work.positions, strict=True)):
        assert position == batch.positions[token]
        ranges = key_ranges(work, index)
        assert ranges[0][0] == 0
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert ranges[-1][0] <= position < ranges[-1][1]


def test_a_shared_prefix_is_one_round_of_all_tokens_that_share_it() -> None:
    work = plan(build([1024] * 16, [1] * 16, shared_blocks=64))
    assert work.rounds[0, :4].tolist() == [0, 16, 0, 1024]
    assert Counter((first, end) for _, _, first, end, *_ in work.rounds.tolist()) == {(0, 1024): 1, (1024, 1025): 16}


def test_a_prefix_shared_by_two_of_three_is_a_round_of_these_two() -> None:
    batch = build([512, 512, 512], [1, 1, 1], shared_blocks=8)
    tables = batch.host_tables.copy()
    tables[2, :24] = tables[0, :24]
    work = plan(PagedBatch.build([1, 1, 1], [513] * 3, list(tables), BLOCK_SIZE))
    num_tokens = {
        (first_key, end_key): end_token - first_token
        for first_token, end_token, first_key, end_key, *_ in work.rounds.tolist()
        if end_key <= 384
    }
    assert num_tokens == {(0, 128): 3, (128, 384): 2}


def test_rounds_have_the_index_of_their_first_block() -> None:
    work = plan(build([130, 700], [1, 1]))
    for first_token, _, first_key, _, _, first_block_index in work.rounds.tolist():
        table = work.blocks.reshape(2, -1)[work.tokens[first_token]]
        assert work.blocks[first_block_index] == table[first_key // BLOCK_SIZE]


def test_a_window_begins_with_the_block_of_its_first_key() -> None:
    work = plan(build([1000], [3]), window=100)
    [(_, _, first_key, end_key, first_written, _)] = work.rounds.tolist()
    assert (first_key, end_key, first_written) == (896, 1003, 901)


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_items_cover_each_row_of_each_head_once(num_threads: int) -> None:
    work = plan(build([1000, 700, 0], [3, 200, 70]), num_threads=num_threads)
    items_per_row = Counter(
        (head, row) for head, first_row, end_row, *_ in work.items.tolist() for row in range(first_row, end_row)
    )
    assert items_per_row == {(head, row): 1 for head in range(2) for row in range(273 * 7)}  # 7 rows per token
    assert work.max_rows == max(end_row - first_row for _, first_row, end_row, *_ in work.items.tolist())


def test_an_item_has_all_rounds_of_its_rows() -> None:
    work = plan(build([1000, 700, 0], [3, 200, 70]))
    for _, first_row, end_row, first_round, end_round in work.items.tolist():
        tokens = {row // 7 for row in range(first_row, end_row)}
        for index, (first_token, end_token, *_) in enumerate(work.rounds.tolist()):
            if tokens & set(range(first_token, end_token)):
                assert first_round <= index < end_round


def test_more_threads_get_more_items() -> None:
    batch = build([1024], [64])
    assert len(plan(batch, num_threads=8).items) > len(plan(batch).items)


def test_items_of_longer_rows_have_fewer_rows() -> None:
    batch = build([1024], [64])
    assert [plan(batch, head_dim=head_dim).max_rows for head_dim in (64, 192, 576)] == [448, 168, 128]
