import numpy as np
import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.gpu.low_rank import RANKS, TILE_ROWS, LowRankStep, add_low_rank, low_rank_rows_agree, padded_rank

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Ranges of rows of three adapters: less than a tile, more than a tile, and several ranges. The other rows have none.
ROWS = [[(1, 3)], [(5, 24)], [(30, 31), (3, 4), (33, 36)]]
NUM_ROWS = 37


class Case:
    """Rows, a random output of a linear layer for them, and three adapters whose results are added to the output."""

    def __init__(self, dtype: torch.dtype, out_features: int, in_features: int, rank: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(device, dtype)

        self.device, self.rank = device, rank
        self.rows, self.out = make(NUM_ROWS, in_features), make(NUM_ROWS, out_features)
        self.downs = [make(rank, in_features, scale=in_features**-0.5) for _ in ROWS]
        self.ups = [make(out_features, rank, scale=rank**-0.5) for _ in ROWS]
        no_weights = [(0, 0)] * len(ROWS)
        weights = [(down.data_ptr(), up.data_ptr()) for down, up in zip(self.downs, self.ups, strict=True)]
        self.addresses = np.array([no_weights, weights])  # site 0 has no adapter weights, site 1 has

    def add(self, ranges: list[list[tuple[int, int]]], out: torch.Tensor | None = None) -> torch.Tensor:
        got = self.out.clone() if out is None else out
        add_low_rank(self.rows[None], got[None], LowRankStep.build(ranges, self.addresses, self.device), 1, self.rank)
        return got

    def expected(self) -> torch.Tensor:
        out = self.out.clone()
        for ranges, down, up in zip(ROWS, self.downs, self.ups, strict=True):
            chosen = torch.cat([torch.arange(*each) for each in ranges]).to(self.device)
            reference.add_low_rank(self.rows, out, chosen, down, up)
        return out


@pytest.mark.parametrize(
    ("out_features", "in_features", "rank"), [(96, 136, 16), (37, 33, 32), (520, 64, 16), (64, 200, 64), (70, 80, 128)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_applies_each_adapter_to_its_rows(
    dtype: torch.dtype, out_features: int, in_features: int, rank: int, kernel_device: str
) -> None:
    case = Case(dtype, out_features, in_features, rank, kernel_device)
    got, expected = case.add(ROWS), case.expected()
    torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5 + 4 * torch.finfo(dtype).eps)
    chosen = {row for ranges in ROWS for first, last in ranges for row in range(first, last)}
    others = sorted(set(range(NUM_ROWS)) - chosen)
    assert torch.equal(got[others], case.out[others])
    assert (got[sorted(chosen)] != case.out[sorted(chosen)]).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype, kernel_device: str) -> None:
    case = Case(dtype, 70, 100, 16, kernel_device)
    whole = case.add([[(0, NUM_ROWS)], [], []])
    for ranges in ([(7, 8)], [(20, NUM_ROWS), (0, 20)], [(3, 18)]):
        got = case.add([ranges, [(1, 2)] if ranges[-1][0] > 2 else [], []])
        for first, last in ranges:
            assert torch.equal(got[first:last], whole[first:last])
    case.rows = case.rows[5:].contiguous()
    assert torch.equal(case.add([[(0, 20)], [], []], case.out[5:].clone())[:20], whole[5:25])


def test_an_adapter_without_weights_at_a_site_changes_nothing(kernel_device: str) -> None:
    case = Case(torch.float32, 64, 64, 16, kernel_device)
    got = case.out.clone()
    add_low_rank(case.rows, got, LowRankStep.build(ROWS, case.addresses, kernel_device), 0, 16)
    assert torch.equal(got, case.out)


def test_the_check_of_a_shape_distinguishes_batch_invariant_results(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    down, up = (torch.empty(*shape, device=kernel_device) for shape in ((16, 48), (40, 16)))
    assert low_rank_rows_agree(down, up)

    def add_by_row_count(rows: torch.Tensor, out: torch.Tensor, step: LowRankStep, *_: object) -> None:
        weights = torch.ones(16, 48), torch.ones(40, 16)
        reference.add_low_rank(rows, out, step.order.long(), *weights)
        out += 1e-3 * len(rows)

    monkeypatch.setattr("radixkv.kernels.gpu.low_rank.add_low_rank", add_by_row_count)
    assert not low_rank_rows_agree(torch.empty(16, 48), torch.empty(40, 16))


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = Case(torch.float32, 8, 8, 16, "cpu")
    step = LowRankStep.build(ROWS, case.addresses)
    with pytest.raises(ValueError, match=r"^out: expected shape \(37, 8\) in torch\.float32 on cpu, got \(36, 8\)"):
        add_low_rank(case.rows, case.out[1:], step, 1, 16)
    with pytest.raises(ValueError, match=r"^out: expected contiguous rows, and a rank of \(16, 32, 64, 128\)"):
        add_low_rank(case.rows, case.out, step, 1, 17)
    with pytest.raises(ValueError, match=r"^out: expected contiguous rows"):
        add_low_rank(case.rows, torch.empty(37, 9)[:, :8], step, 1, 16)


def test_ranks_are_padded() -> None:
    assert [padded_rank(rank) for rank in (1, 16, 17, 33, 128, 129)] == [16, 16, 32, 64, 128, None]
    assert padded_rank(RANKS[-1]) == RANKS[-1]


def test_every_row_is_in_one_tile_of_its_adapter() -> None:
    rows = [[(3, 4)], [(10, 60), (0, 3)], [(70, 71), (5, 6), (80, 111)]]
    step = LowRankStep.build(rows, np.zeros((1, 3, 2), dtype=np.int64))
    rows_of_adapters: list[set[int]] = [set(), set(), set()]
    for start, end, adapter in step.tiles.tolist():
        assert 0 < end - start <= TILE_ROWS
        tile = set(step.order[start:end].tolist())
        assert len(tile) == end - start
        assert not rows_of_adapters[adapter] & tile
        rows_of_adapters[adapter] |= tile
    assert rows_of_adapters == [{row for first, last in ranges for row in range(first, last)} for ranges in rows]
    assert len(step.tiles) == 1 + 4 + 3  # for 1, 53 and 33 rows, 16 in a tile
    assert step.order.numel() == sum(map(len, rows_of_adapters))
