"""Makes row functions of CPU libraries batch-invariant.

The order in which a library adds up a row of a matmul depends on the row count. Here a matmul is split into calls with
a few fixed row counts, which gave bitwise identical results when they were checked:

    37 rows      [-------- 32 --------)[-- 8: 5 and zeros --)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property

import torch
from torch.nn.functional import pad

RowFunction = Callable[[torch.Tensor], torch.Tensor]

# Row counts of calls. Row counts in between take up to a third longer, and checking each takes 1 to 10 ms. 384 is not
# one of them: as 256 and 128 it takes 1 to 3 % longer, and checking it took a fifth of the first load.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


class RowTiles:
    """Finds the cheapest calls, of a few fixed row counts, that together cover a given number of rows.

    >>> tiles = RowTiles({2: 10.0, 16: 20.0, 64: 70.0})
    >>> tiles.cover(37), tiles.cover(3), tiles.cover(130)
    ((16, 16, 16), (16,), (64, 64, 2))

    Args:
        costs: the cost of a call by its row count; at least one.
    """

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = costs
        self._covers: dict[int, tuple[int, ...]] = {}

    def cover(self, num_rows: int) -> tuple[int, ...]:
        """Return the row count of each call, in descending order. The last call may be padded."""
        cover = self._covers.get(num_rows)
        if cover is None:
            largest = max(self.costs)
            # The last rows, fewer than twice `largest`, may be cheapest in calls that are all smaller than `largest`.
            num_largest = max(0, num_rows // largest - 1)
            cover = (largest,) * num_largest + self._cheapest[num_rows - num_largest * largest]
            self._covers[num_rows] = cover
        return cover

    def cost(self, num_rows: int) -> float:
        """Return the cost of a number of rows."""
        return sum(self.costs[size] for size in self.cover(num_rows))

    @cached_property
    def _cheapest(self) -> list[tuple[int, ...]]:
        """The cheapest cover of each number of rows, from 0 to less than twice the largest row count."""
        min_costs = [0.0]  # by number of rows
        last_sizes = [0]  # the row count of one call of the cheapest cover
        for num_rows in range(1, 2 * max(self.costs)):
            # Of several sizes with the same total cost, the largest one is chosen.
            cost, negative_size = min(
                (min_costs[max(0, num_rows - size)] + size_cost, -size) for size, size_cost in self.costs.items()
            )
            min_costs.append(cost)
            last_sizes.append(-negative_size)
        covers: list[tuple[int, ...]] = [()]
        for num_rows in range(1, len(min_costs)):
            other_calls = covers[max(0, num_rows - last_sizes[num_rows])]
            covers.append(tuple(sorted((*other_calls, last_sizes[num_rows]), reverse=True)))
        return covers


@cache
def tiles_of(costs: tuple[tuple[int, float], ...]) -> RowTiles:
    """Return the tiles for pairs of a row count and its cost. Cached, since finding the covers takes milliseconds."""
    return RowTiles(dict(costs))


def in_tiles(function: RowFunction, rows: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
    """Apply a row function in calls with the row counts of `tiles`.

    Args:
        function: takes `[num_rows, in_features]` and returns `[num_rows, out_features]`.
        rows: `[num_rows, in_features]`, at least one row.
        tiles: the row counts.

    Returns:
        `[num_rows, out_features]`.
    """
    num_rows = rows.shape[0]
    sizes = tiles.cover(num_rows)
    padding = sum(sizes) - num_rows
    if padding:
        rows = pad(rows, (0, 0, 0, padding))
    if len(sizes) == 1:
        return function(rows)[:num_rows] if padding else function(rows)
    return torch.cat([function(tile) for tile in torch.split(rows, list(sizes))])[:num_rows]
