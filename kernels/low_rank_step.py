"""Lays out the rows of a step that adapters add to, for all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.staging import to_device

# Rows of a program: the fewest of a tensor core. Always this number, so that a row's bits do not depend on the step.
TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class LowRankStep:
    """Rows of a step by adapter, and where the adapters' weights are. Built once a step, read by all layers.

        adapters    [ 0 ............ )[ 1 ... )
        order       [ 4 5 6 7 .. 30  31 2 3 40 )    rows of the step, those of an adapter one after the other
        tiles       [ 16 )[ 16 )[ 2 )[ 3 )          each of rows of one adapter

    Attributes:
        order: int32 `[num_rows]`, rows of the step.
        tiles: int32 `[num_tiles, 3]`, the start and the end of each tile in `order`, and its adapter.
        addresses: int64 `[num_sites, num_adapters, 2]`, of `down` and `up`; 0 where an adapter adds nothing.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    addresses: torch.Tensor

    @classmethod
    def build(
        cls,
        rows: Sequence[Sequence[tuple[int, int]]],
        addresses: npt.NDArray[np.int64],
        device: torch.device | str = "cpu",
    ) -> LowRankStep:
        """Lay out a step.

        >>> step = LowRankStep.build([[(4, 30), (2, 4)], [(40, 43)]], np.zeros((1, 2, 2), dtype=np.int64))
        >>> step.tiles.tolist()
        [[0, 16, 0], [16, 28, 0], [28, 31, 1]]
        >>> step.order[26:].tolist()
        [2, 3, 40, 41, 42]

        Args:
            rows: half-open ranges of rows of each adapter, no row twice.
            addresses: see the attributes; int64 on the host.
            device: device of the tensors.
        """
        order = [np.arange(start, end, dtype=np.int32) for ranges in rows for start, end in ranges]
        tiles, start = [], 0
        for adapter, ranges in enumerate(rows):
            end = start + sum(last - first for first, last in ranges)
            tiles += [(first, min(first + TILE_ROWS, end), adapter) for first in range(start, end, TILE_ROWS)]
            start = end
        tensors = (
            torch.from_numpy(np.concatenate(order)),
            torch.tensor(tiles, dtype=torch.int32),
            torch.from_numpy(addresses),
        )
        return cls(*(to_device(each, device) for each in tensors))
