import random

import numpy as np
import pytest

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu import joined_rows
from radixkv.kernels.gpu.attention_splits import Splits
from radixkv.kernels.gpu.joined_rows import Joins, join_rows, may_join

BLOCK_SIZE = 16


def decoding(tables: list[list[int]], kv_lens: list[int]) -> PagedBatch:
    ids = [np.array(table, dtype=np.int32) for table in tables]
    return PagedBatch.build([1] * len(kv_lens), kv_lens, ids, BLOCK_SIZE)


def joined(batch: PagedBatch, num_rows: int | list[int], tile_rows: int = 16, unit_tokens: int = 16) -> Joins | None:
    rows = np.full(batch.num_requests, num_rows) if isinstance(num_rows, int) else np.array(num_rows)
    return join_rows(batch, rows, np.array(batch.kv_lens) - 1, tile_rows, unit_tokens)


@pytest.mark.parametrize("unit_tokens", [16, 32])
def test_joins_hold_what_their_requests_share(unit_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tables. With an eager rule every key of a request is joined that two of them share, in large tiles."""
    monkeypatch.setattr(joined_rows, "_SAVED_KEYS_PER_ROW", 1e-3)
    num_joined = 0
    for seed in range(200):
        rng = random.Random(seed)
        tables: list[list[int]] = []
        for _ in range(rng.randint(1, 7)):
            base = rng.choice(tables)[: rng.randint(0, 10)] if tables and rng.random() < 0.8 else []
            tables.append(base + [rng.randint(0, 2) for _ in range(10 - len(base))])
        kv_lens = [rng.randint(1, 160) for _ in tables]
        num_rows = [rng.randint(0, 9) for _ in tables]
        joins = joined(decoding(tables, kv_lens), num_rows, 128, unit_tokens)
        shared = [
            max(
                (
                    unit * unit_tokens
                    for other in range(len(tables))
                    for unit in range(11 * BLOCK_SIZE // unit_tokens)
                    if other != request and num_rows[request] and num_rows[other]
                    if unit * unit_tokens < min(kv_lens[request], kv_lens[other])
                    if tables[request][: unit * unit_tokens // BLOCK_SIZE]
                    == tables[other][: unit * unit_tokens // BLOCK_SIZE]
                ),
                default=0,
            )
            for request in range(len(tables))
        ]
        if joins is None:
            assert not any(shared)
            continue
        num_joined += 1
        assert joins.end_keys.tolist() == shared
        assert sorted(joins.requests.tolist()) == [request for request, keys in enumerate(shared) if keys]
        rows = np.repeat(joins.requests, np.array(num_rows)[joins.requests]).tolist()
        covered = dict.fromkeys(range(len(tables)), 0)
        for first_key, end_key, first_row, end_row, requests in joins.joins:
            assert rows[first_row:end_row] == [request for request in requests for _ in range(num_rows[request])]
            for request in requests.tolist():
                assert covered[request] == first_key, "those before it come first"
                covered[request] = end_key
        assert list(covered.values()) == shared
    assert num_joined > 50


@pytest.mark.parametrize(("num_shared_blocks", "is_joined"), [(3, False), (4, True)])
def test_a_join_saves_more_than_its_results_cost(num_shared_blocks: int, is_joined: bool) -> None:
    """16 rows want 64 keys saved."""
    first, second = list(range(8)), [*range(num_shared_blocks), *range(8, 16 - num_shared_blocks)]
    assert (joined(decoding([first, second], [128, 128]), 8) is not None) == is_joined


def test_keys_before_a_join_are_joined_as_well() -> None:
    """The first block saves one reading for 24 rows, which is not enough; what follows it is."""
    tables = [list(range(9)), list(range(9)), [0, *range(10, 18)]]
    batch = decoding(tables, [144, 140, 144])
    joins = joined(batch, 8, tile_rows=16)
    assert joins is not None
    assert [(join.first_key, join.end_key, join.requests.tolist()) for join in joins.joins] == [
        (0, 16, [0, 1, 2]),
        (16, 128, [0, 1]),
    ]
    assert joined(decoding(tables[1:], [144, 140]), 8) is None


def test_rows_that_fill_their_tiles_join_nothing() -> None:
    batch = decoding([list(range(9)), list(range(9))], [144, 140])
    assert joined(batch, 8, tile_rows=16) is not None
    assert joined(batch, 9, tile_rows=16) is None, "18 rows take two tiles either way"


def test_pieces_are_cut_at_multiples_of_the_split_size() -> None:
    tables = [list(range(12)), list(range(12)), [*range(5), *range(20, 27)]]
    joins = joined(decoding(tables, [192, 180, 192]), 4, tile_rows=8)
    assert joins is not None
    pieces, num_seen = joins.pieces(tile_rows=8, splits=Splits(64, is_even=False))
    levels = [(0, 64, 0), (64, 80, 1)], [(80, 128, 2), (128, 176, 3)]
    first = [(row, min(row + 8, 12), *keys) for row in (0, 8) for keys in levels[0]]
    second = [(0, 8, *keys) for keys in levels[1]]
    assert sorted(map(tuple, pieces[1:].T.tolist())) == sorted(first + second)
    assert num_seen.tolist() == [4, 4, 2]
    assert joins.num_tile_keys(8) == 2 * 80 + 96


@pytest.mark.parametrize(("window", "expected"), [(None, True), (144, True), (143, False)])
def test_which_rows_may_join(window: int | None, expected: bool) -> None:
    assert may_join(decoding([list(range(9)), list(range(9))], [144, 140]), window) == expected
    assert not may_join(decoding([list(range(9)), list(range(9, 18))], [144, 140]), window)
