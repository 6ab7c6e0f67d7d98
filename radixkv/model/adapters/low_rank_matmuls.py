"""Applies adapters on a CPU: two matmuls per adapter and site, each over the rows of that adapter.

site                 one matmul of the model: a linear layer, or several merged ones
qkv of rank 8        down [24, in_features]: q, k and v stacked
                     up   [q | k | v, 24]: block diagonal
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from radixkv.errors import InvalidAdapter
from radixkv.kernels.cpu.gemm_backends import ALIGNMENT_BYTES, aligned_rows, gemm_backends
from radixkv.kernels.cpu.row_tiles import RowTiles, tiles_of
from radixkv.model.adapters.adapter_files import LowRank
from radixkv.model.layers.gemm_tuner import GemmTuner
from radixkv.model.layers.packed_linear import Matmul
from radixkv.model.refusals import SERVE_FAST

# The rank of each layer is padded with zeros to a multiple of this number, so that few shapes have to be checked.
_RANK_MULTIPLE = 8


Ranges = Sequence[tuple[int, int]]  # rows of a step, half-open


class ColumnUpdate(NamedTuple):
    """The update of an adapter to the columns `[start, end)` of a site."""

    start: int
    end: int
    low_rank: LowRank


class _Addition(NamedTuple):
    """The packed updates of an adapter to a site.

    Attributes:
        start, end: the columns of the site that change.
        down, up: the matmuls.
        tiles: the row counts that both matmuls can be called with; None if any row count is allowed, or if they have
            none in common.
    """

    start: int
    end: int
    down: Matmul
    up: Matmul
    tiles: RowTiles | None


# An adapter packed for matmuls, by site.
PackedMatmuls = Mapping[int, _Addition]


class LowRankMatmuls:
    """Packs adapters, and applies them to rows.

    Args:
        tuner: chooses the GEMM backend of each shape; in exact mode, one that is batch-invariant.
    """

    def __init__(self, tuner: GemmTuner) -> None:
        self._tuner = tuner
        self._groups: list[tuple[slice | torch.Tensor, PackedMatmuls]] = []

    def pack(self, sites: Mapping[int, Sequence[ColumnUpdate]]) -> PackedMatmuls:
        """Pack an adapter. Shapes that were not checked before are checked, which takes 50 ms each.

        Args:
            sites: its updates by site, in the order of their columns.

        Raises:
            InvalidAdapter: its matmuls are not batch-invariant on this machine.
        """
        return {site: self._pack_site(updates) for site, updates in sites.items()}

    def num_bytes(self, sites: Mapping[int, Sequence[ColumnUpdate]]) -> int:
        """Return the bytes that an adapter takes after `pack`."""
        num_bytes = 0
        for updates in sites.values():
            down = updates[0].low_rank.down
            num_columns = updates[-1].end - updates[0].start
            num_bytes += sum(_padded_ranks(updates)) * (down.shape[1] + num_columns) * down.element_size()
        return num_bytes

    def set_adapters(self, groups: Sequence[tuple[Ranges, PackedMatmuls]]) -> None:
        """Set the adapters of the next forward pass, with the rows of each."""
        self._groups = [(_row_selection(ranges), packed) for ranges, packed in groups]

    def add(self, site: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the updates of the forward pass's adapters at a site.

        Args:
            site: index of the site.
            rows: `[..., in_features]`, all rows of the forward pass.
            out: contiguous `[..., out_features]`, the output of the base model's matmul; changed in place.
        """
        if not self._groups:
            return
        flat_rows, flat_out = aligned_rows(rows), out.view(-1, out.shape[-1])
        with torch._C.DisableTorchFunction():  # these matmuls are exact by themselves
            for selection, packed in self._groups:
                addition = packed.get(site)
                if addition is None:
                    continue
                columns = flat_out[:, addition.start : addition.end]
                if isinstance(selection, slice):
                    _add(addition, flat_rows, columns, selection.start, selection.stop)
                else:
                    added = flat_rows.new_zeros(len(selection), columns.shape[1])
                    _add(addition, flat_rows[selection], added, 0, len(selection))
                    columns.index_add_(0, selection, added)

    def _pack_site(self, updates: Sequence[ColumnUpdate]) -> _Addition:
        start, end = updates[0].start, updates[-1].end
        ranks = _padded_ranks(updates)
        like = updates[0].low_rank.down
        down, up = like.new_zeros(sum(ranks), like.shape[1]), like.new_zeros(end - start, sum(ranks))
        first_rank = 0
        for update, padded_rank in zip(updates, ranks, strict=True):
            end_rank = first_rank + update.low_rank.down.shape[0]
            down[first_rank:end_rank] = update.low_rank.down
            up[update.start - start : update.end - start, first_rank:end_rank] = update.low_rank.up
            first_rank += padded_rank
        matmuls = self._pack_matmul(down), self._pack_matmul(up)
        return _Addition(start, end, *matmuls, _common_tiles(*matmuls))

    def _pack_matmul(self, weight: torch.Tensor) -> Matmul:
        # The first suitable backend, unpacked weights first: with 8 to 48 output features they were the fastest, and
        # packed ones took up to 4 times as long. Timing all backends takes twice as long.
        backends = sorted(gemm_backends(weight), key=lambda name: name != "plain")
        choices = (self._tuner.choose(weight, None, (backend,)) for backend in backends)  # evaluated one by one
        choice = next((each for each in choices if each is not None), None)
        if choice is None:
            raise InvalidAdapter(
                f"adapter: no batch-invariant matmul for a weight of shape {tuple(weight.shape)} in {weight.dtype} on "
                f"this machine; {SERVE_FAST}"
            )
        return Matmul([weight], None, choice)


def _padded_ranks(updates: Sequence[ColumnUpdate]) -> list[int]:
    """Return the rank of each update, padded to a multiple of `_RANK_MULTIPLE`."""
    return [-(-each.low_rank.down.shape[0] // _RANK_MULTIPLE) * _RANK_MULTIPLE for each in updates]


def _row_selection(ranges: Ranges) -> slice | torch.Tensor:
    """Select rows by a slice if they are contiguous, otherwise by indices."""
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.cat([torch.arange(start, end) for start, end in ranges])


def _common_tiles(down: Matmul, up: Matmul) -> RowTiles | None:
    costs = tuple((size, cost + up.costs[size]) for size, cost in down.costs.items() if size in up.costs)
    return tiles_of(costs) if costs else None


def _add(addition: _Addition, rows: torch.Tensor, columns: torch.Tensor, start: int, end: int) -> None:
    """Add the update to `columns` for the rows `[start, end)` of a matrix that `aligned_rows` returned.

    A call needs a supported row count. If an adapter has fewer rows, neighboring rows pad the call, and their results
    are dropped:

        rows      [ 0 ... start )[ start .. end )[ .... )
        calls           [-- 8 --)[-- 8 --)
                        dropped )[ added )
    """
    down, up, tiles = addition.down, addition.up, addition.tiles
    num_rows = rows.shape[0]
    is_aligned = rows.stride(0) * rows.element_size() % ALIGNMENT_BYTES == 0  # then every row is aligned
    if tiles is None:
        columns[start:end].add_(up(down(rows[start:end])))
        return
    for size in tiles.cover(end - start):
        tile_end = min(start + size, end)
        if size > num_rows:  # the matmuls pad the rows
            columns[start:tile_end].add_(up(down(rows[start:tile_end])))
        else:
            call_start = min(start, num_rows - size)
            call_rows = rows[call_start : call_start + size]
            added = up.multiply_in_one_call(
                down.multiply_in_one_call(call_rows if is_aligned else aligned_rows(call_rows))
            )
            columns[start:tile_end].add_(added[start - call_start : tile_end - call_start])
        start = tile_end
