import pytest
import torch

from radixkv.kernels.cpu.row_tiles import SIZES, RowTiles, in_tiles

COSTS = {2: 10.0, 16: 20.0, 64: 70.0}


@pytest.mark.parametrize("num_rows", [*range(1, 70), 127, 128, 129, 513, 1100])
def test_every_row_is_covered_by_known_row_counts(num_rows: int) -> None:
    tiles = RowTiles(COSTS)
    sizes = tiles.cover(num_rows)
    assert set(sizes) <= set(COSTS)
    assert sum(sizes) - sizes[-1] < num_rows <= sum(sizes)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert tiles.cost(num_rows) == sum(COSTS[size] for size in sizes)


def test_the_cheapest_calls_are_taken() -> None:
    assert RowTiles(COSTS).cover(33) == (16, 16, 2)
    assert RowTiles({2: 10.0, 16: 20.0, 64: 45.0}).cover(33) == (64,)
    assert RowTiles({1: 1.0, 512: 100.0}).cover(600) == (512,) + (1,) * 88


@pytest.mark.parametrize("num_rows", [1, 2, 15, 37, 64, 65, 200])
def test_tiled_results_match_the_function(num_rows: int) -> None:
    rows = torch.randn(num_rows, 5, generator=torch.Generator().manual_seed(0))
    row_counts = []  # of the calls

    def double(piece: torch.Tensor) -> torch.Tensor:
        row_counts.append(piece.shape[0])
        return 2 * piece

    tiles = RowTiles(COSTS)
    assert torch.equal(in_tiles(double, rows, tiles), 2 * rows)
    assert tuple(row_counts) == tiles.cover(num_rows)


def test_sizes_ascend() -> None:
    assert list(SIZES) == sorted(set(SIZES))
