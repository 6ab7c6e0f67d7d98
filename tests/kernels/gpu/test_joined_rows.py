import random

import numpy as np
import pytest

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu import joined_rows
from radixkv.kernels.gpu.attention_splits import Splits
from radixkv.kernels.gpu.joined_rows import Joins, join_rows, may_join

BLOCK_SIZE = 16


def decode_batch(tables: list[list[int]], kv_lens: list[int]) -> PagedBatch:
    """Build a batch of requests with one new token each."""
    block_tables = [np.array(table, dtype=np.int32) for table in tables]
    return PagedBatch.build([1] * len(kv_lens), kv_lens, block_tables, BLOCK_SIZE)


def join(batch: PagedBatch, num_rows: int | list[int], tile_rows: int = 16, unit_tokens: int = 16) -> Joins | None:
    """Join the rows of a batch of `decode_batch`; `num_rows` is the number of rows of every request, or of each."""
    rows = np.full(batch.num_requests, num_rows) if isinstance(num_rows, int) else np.array(num_rows)
    return join_rows(batch, rows, np.array(batch.kv_lens) - 1, tile_rows, unit_tokens)


def num_shared_keys(
    request: int, tables: list[list[int]], kv_lens: list[int], num_rows: list[int], unit_tokens: int
) -> int:
    """Return how many keys, in whole units, a request shares with any other one, if both have rows."""
    num_shared = 0
    for other in range(len(tables)):
        if other == request or not num_rows[request] or not num_rows[other]:
            continue
        for num_keys in range(0, min(kv_lens[request], kv_lens[other]), unit_tokens):
            num_blocks = num_keys // BLOCK_SIZE
            if tables[request][:num_blocks] == tables[other][:num_blocks]:
                num_shared = max(num_shared, num_keys)
    return num_shared


@pytest.mark.parametrize("unit_tokens", [16, 32])
def test_joins_hold_what_their_requests_share(unit_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If joins need not save much and tiles are large, all keys that two requests share are joined."""
    monkeypatch.setattr(joined_rows, "_SAVED_KEYS_PER_ROW", 1e-3)
    num_joined = 0
    for seed in range(200):
        rng = random.Random(seed)
        tables: list[list[int]] = []
        for _ in range(rng.randint(1, 7)):
            shared = rng.choice(tables)[: rng.randint(0, 10)] if tables and rng.random() < 0.8 else []
            tables.append(shared + [rng.randint(0, 2) for _ in range(10 - len(shared))])
        kv_lens = [rng.randint(1, 160) for _ in tables]
        num_rows = [rng.randint(0, 9) for _ in tables]
        joins = join(decode_batch(tables, kv_lens), num_rows, 128, unit_tokens)
        expected_end_keys = [
            num_shared_keys(request, tables, kv_lens, num_rows, unit_tokens) for request in range(len(tables))
        ]
        if joins is None:
            assert not any(expected_end_keys)
            continue
        num_joined += 1
        assert joins.end_keys.tolist() == expected_end_keys
        assert sorted(joins.requests.tolist()) == [i for i, end_key in enumerate(expected_end_keys) if end_key]
        request_of_rows = np.repeat(joins.requests, np.array(num_rows)[joins.requests]).tolist()
        covered = dict.fromkeys(range(len(tables)), 0)  # by request, the end of its keys in the joins so far
        for first_key, end_key, first_row, end_row, requests in joins.joins:
            expected_requests = np.repeat(requests, np.array(num_rows)[requests]).tolist()
            assert request_of_rows[first_row:end_row] == expected_requests
            for request in requests.tolist():
                assert covered[request] == first_key, "joins of earlier keys precede those of later keys"
                covered[request] = end_key
        assert list(covered.values()) == expected_end_keys
    assert num_joined > 50, "in most of the 200 batches, keys are shared"


@pytest.mark.parametrize(("num_shared_blocks", "is_joined"), [(3, False), (4, True)])
def test_a_join_saves_at_least_4_key_reads_per_row(num_shared_blocks: int, is_joined: bool) -> None:
    """Two requests with 8 rows each are joined if they share at least 64 keys, which is 4 blocks."""
    first, second = list(range(8)), [*range(num_shared_blocks), *range(8, 16 - num_shared_blocks)]
    assert (join(decode_batch([first, second], [128, 128]), 8) is not None) == is_joined


def test_keys_before_a_join_are_joined_as_well() -> None:
    """Joining the first block saves 16 key reads for 24 rows, too few; joining the blocks after it saves enough."""
    tables = [list(range(9)), list(range(9)), [0, *range(10, 18)]]
    batch = decode_batch(tables, [144, 140, 144])
    joins = join(batch, 8, tile_rows=16)
    assert joins is not None
    assert [(join.first_key, join.end_key, join.requests.tolist()) for join in joins.joins] == [
        (0, 16, [0, 1, 2]),
        (16, 128, [0, 1]),
    ]
    assert join(decode_batch(tables[1:], [144, 140]), 8) is None


def test_rows_that_fill_their_tiles_join_nothing() -> None:
    batch = decode_batch([list(range(9)), list(range(9))], [144, 140])
    assert join(batch, 8, tile_rows=16) is not None
    assert join(batch, 9, tile_rows=16) is None, "18 rows take two tiles either way"


def test_pieces_are_cut_at_multiples_of_the_split_size() -> None:
    tables = [list(range(12)), list(range(12)), [*range(5), *range(20, 27)]]
    joins = join(decode_batch(tables, [192, 180, 192]), 4, tile_rows=8)
    assert joins is not None
    pieces, num_seen = joins.pieces(tile_rows=8, splits=Splits(64, is_even=False))
    # All three requests, with 12 rows, share 80 keys; the first two, with 8 rows, share 176. Ranges of keys, and the
    # index of the piece among those of the same rows:
    shared_by_three, shared_by_two = [(0, 64, 0), (64, 80, 1)], [(80, 128, 2), (128, 176, 3)]
    pieces_of_three = [(row, min(row + 8, 12), *keys_and_index) for row in (0, 8) for keys_and_index in shared_by_three]
    pieces_of_two = [(0, 8, *keys_and_index) for keys_and_index in shared_by_two]
    assert sorted(map(tuple, pieces[1:].T.tolist())) == sorted(pieces_of_three + pieces_of_two)
    assert num_seen.tolist() == [4, 4, 2]
    assert joins.num_tile_keys(8) == 2 * 80 + 96


@pytest.mark.parametrize(("window", "expected"), [(None, True), (144, True), (143, False)])
def test_which_rows_may_join(window: int | None, expected: bool) -> None:
    assert may_join(decode_batch([list(range(9)), list(range(9))], [144, 140]), window) == expected
    assert not may_join(decode_batch([list(range(9)), list(range(9, 18))], [144, 140]), window)
