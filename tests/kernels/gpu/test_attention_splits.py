import numpy as np
import pytest

from radixkv.kernels.gpu.attention_splits import HOPPER, DeviceCapacity, Splits, even_splits

from .waves import KV_HEADS, SHAPES, attention_us, batch_of, best_us, plan, split_tokens_before

H100_PCIE = DeviceCapacity(num_multiprocessors=114)


@pytest.mark.parametrize("capacity", [HOPPER, H100_PCIE])
@pytest.mark.parametrize("new_tokens", [16, 32, 64, 128])
def test_a_short_suffix_takes_hardly_longer_than_with_the_best_split(new_tokens: int, capacity: DeviceCapacity) -> None:
    batch = batch_of([(new_tokens, 8192)])
    now = plan(batch, None, capacity)
    assert attention_us(now, KV_HEADS, capacity) <= 1.1 * best_us(batch, capacity)
    assert len(now.work) * KV_HEADS <= capacity.num_programs(now.tile_rows), "all programs run at the same time"


@pytest.mark.parametrize(("new_tokens", "cached_tokens"), SHAPES)
def test_no_shape_takes_longer_than_with_powers_of_two(new_tokens: int, cached_tokens: int) -> None:
    capacity = HOPPER
    batch = batch_of([(new_tokens, cached_tokens)])
    before = plan(batch, split_tokens_before(batch, capacity), capacity)
    assert attention_us(plan(batch, None, capacity), KV_HEADS, capacity) <= attention_us(before, KV_HEADS, capacity)


def test_decoding_with_a_long_request_is_estimated_no_slower_than_with_powers_of_two() -> None:
    capacity = HOPPER
    for lens in ([(1, 8192)], [(1, 500)] * 60 + [(1, 60000)], [(1, 1000 * n) for n in range(1, 20)]):
        batch = batch_of(lens)
        before = plan(batch, split_tokens_before(batch, capacity), capacity)
        assert attention_us(plan(batch, None, capacity), KV_HEADS, capacity) <= 1.05 * attention_us(
            before, KV_HEADS, capacity
        )


def test_splits_of_a_tile_are_equally_long() -> None:
    splits = Splits(512, is_even=True)
    start, end = np.array([64, 0]), np.array([64 + 1100, 500])
    counts = splits.counts(start, end)
    assert counts.tolist() == [3, 1]
    tile, nth = np.array([0, 0, 0, 1]), np.array([0, 1, 2, 0])
    first, last = splits.bounds(start[tile], end[tile], nth, counts[tile])
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == [(64, 448), (448, 832), (832, 1164), (0, 500)]


def test_fixed_splits_begin_at_multiples_of_their_size() -> None:
    splits = Splits(512, is_even=False)
    start, end = np.array([448]), np.array([1100])
    assert splits.counts(start, end).tolist() == [3]
    bounds = [splits.bounds(start, end, np.array([nth]), np.array([3])) for nth in range(3)]
    assert [(int(first[0]), int(last[0])) for first, last in bounds] == [(448, 512), (512, 1024), (1024, 1100)]


@pytest.mark.parametrize("tile_rows", [16, 64, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 600])
def test_partial_results_stay_within_their_bound(num_kv_heads: int, tile_rows: int) -> None:
    capacity, generator = HOPPER, np.random.default_rng(0)
    for num_tiles in (1, 2, 7, 40, 300):
        num_keys = generator.integers(1, 60000, num_tiles)
        max_partials = capacity.max_partials(1, num_kv_heads, tile_rows)
        splits = even_splits(
            num_keys,
            np.full(num_tiles, tile_rows),
            num_kv_heads=num_kv_heads,
            tile_rows=tile_rows,
            max_partials=max_partials,
            capacity=capacity,
        )
        counts = splits.counts(np.zeros_like(num_keys), num_keys)
        assert counts[counts > 1].sum() <= max_partials
        assert splits.tokens % 64 == 0
        assert counts.max() == 1 or splits.tokens >= 256


def test_large_heads_leave_room_for_fewer_programs() -> None:
    assert DeviceCapacity(132, head_dim=256).num_programs(64) == HOPPER.num_programs(128)
