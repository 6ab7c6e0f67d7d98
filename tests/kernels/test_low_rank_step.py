import numpy as np

from radixkv.kernels.low_rank_step import TILE_ROWS, LowRankStep


def test_every_row_is_in_one_tile_of_its_adapter() -> None:
    rows = [[(3, 4)], [(10, 60), (0, 3)], [(70, 71), (5, 6), (80, 111)]]
    step = LowRankStep.build(rows, np.zeros((1, 3, 2), dtype=np.int64))
    found: list[set[int]] = [set(), set(), set()]
    for start, end, adapter in step.tiles.tolist():
        assert 0 < end - start <= TILE_ROWS
        tile = set(step.order[start:end].tolist())
        assert len(tile) == end - start
        assert not found[adapter] & tile
        found[adapter] |= tile
    assert found == [{row for first, last in ranges for row in range(first, last)} for ranges in rows]
    assert len(step.tiles) == 1 + 4 + 3
    assert step.order.numel() == sum(map(len, found))
