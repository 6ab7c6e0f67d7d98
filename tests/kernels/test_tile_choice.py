import numpy as np
import pytest
import torch

from radixkv.kernels.attention_plan import plan_attention
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.tile_choice import fitting_tile_rows, tile_rows_for

BF16 = torch.bfloat16


def batch_of(num_requests: int, num_shared: int, num_own: int, query_len: int = 1) -> PagedBatch:
    """Requests that share blocks of 64 tokens, and have some of their own."""
    shared, ids = np.arange(num_shared), np.arange(num_shared, num_shared + num_requests * num_own)
    tables = [np.concatenate((shared, own)).astype(np.int32) for own in np.split(ids, num_requests)]
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
def test_a_tile_is_never_smaller_than_the_longest_suffix_wants(query_len: int) -> None:
    for num_shared in (0, 50):
        batch = batch_of(3, num_shared, num_own=2, query_len=query_len)
        assert tile_rows_for(batch, 4, BF16) >= fitting_tile_rows(4 * query_len, BF16)
