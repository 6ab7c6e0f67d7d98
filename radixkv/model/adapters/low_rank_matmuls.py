"""Computes on a CPU what adapters add to rows: two products for each adapter and site, each over that adapter's rows.

site                 one product of the model: a linear layer, or several joined ones
qkv of rank 4        down [12, in_features]: those of q, k and v, one after the other
                     up   [q | k | v, 12]: each from its own ranks, zeros elsewhere
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

# Ranks are filled up with zeros to a multiple of this, so that few shapes have to be tried.
_RANKS = 8


Ranges = Sequence[tuple[int, int]]  # rows of a step, half-open


class Part(NamedTuple):
    """Additions of an adapter to the columns `[start, end)` of a site."""

    start: int
    end: int
    low_rank: LowRank


class _Addition(NamedTuple):
    """Additions of an adapter to a site: to the columns `[start, end)`.

    Attributes:
        start, end: columns.
        down, up: the products.
        tiles: numbers of rows that both products have calls for; None where any will do, or each needs its own.
    """

    start: int
    end: int
    down: Matmul
    up: Matmul
    tiles: RowTiles | None


# An adapter laid out for products, by site.
Placed = Mapping[int, _Addition]


class LowRankMatmuls:
    """Lays out adapters, and adds them to rows.

    Args:
        choices: how products are computed; in exact mode so that a row's bits do not depend on other rows.
    """

    def __init__(self, choices: GemmTuner) -> None:
        self._choices = choices
        self._groups: list[tuple[slice | torch.Tensor, Placed]] = []

    def place(self, sites: Mapping[int, Sequence[Part]]) -> Placed:
        """Lay out an adapter. Shapes that were not tried before are tried, which takes a twentieth of a second each.

        Args:
            sites: its parts by site, in the order of their columns.

        Raises:
            InvalidAdapter: rows of its products are not computed alike on this machine.
        """
        return {site: self._joined(parts) for site, parts in sites.items()}

    def num_bytes(self, sites: Mapping[int, Sequence[Part]]) -> int:
        """Bytes that an adapter takes once it is laid out."""
        return sum(
            sum(_ranks(parts)) * (each.down.shape[1] + parts[-1].end - parts[0].start) * each.down.element_size()
            for parts in sites.values()
            for each in (parts[0].low_rank,)
        )

    def begin(self, groups: Sequence[tuple[Ranges, Placed]]) -> None:
        """Set the adapters of the next forward pass, with the rows of each."""
        self._groups = [(_chosen(ranges), placed) for ranges, placed in groups]

    def add(self, site: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add what the adapters of the forward pass add at a site.

        Args:
            site: an index.
            rows: `[..., in_features]`, all rows of the forward pass.
            out: contiguous `[..., out_features]`, the model's product with them; changed in place.
        """
        if not self._groups:
            return
        flat, whole = aligned_rows(rows), out.view(-1, out.shape[-1])
        with torch._C.DisableTorchFunction():  # these products are exact by themselves
            for chosen, placed in self._groups:
                addition = placed.get(site)
                if addition is None:
                    continue
                columns = whole[:, addition.start : addition.end]
                if isinstance(chosen, slice):
                    _add(addition, flat, columns, chosen.start, chosen.stop)
                else:
                    added = flat.new_zeros(len(chosen), columns.shape[1])
                    _add(addition, flat[chosen], added, 0, len(chosen))
                    columns.index_add_(0, chosen, added)

    def _joined(self, parts: Sequence[Part]) -> _Addition:
        start, end = parts[0].start, parts[-1].end
        ranks = _ranks(parts)
        like = parts[0].low_rank.down
        down, up = like.new_zeros(sum(ranks), like.shape[1]), like.new_zeros(end - start, sum(ranks))
        first = 0
        for part, rank in zip(parts, ranks, strict=True):
            last = first + part.low_rank.down.shape[0]
            down[first:last] = part.low_rank.down
            up[part.start - start : part.end - start, first:last] = part.low_rank.up
            first += rank
        products = self._product(down), self._product(up)
        return _Addition(start, end, *products, _tiles(*products))

    def _product(self, weight: torch.Tensor) -> Matmul:
        # The first that will do. Weights as they are: with 8 to 48 output features they were the fastest, and packed
        # ones took up to 4 times as long. A trial of all takes twice as long.
        backends = sorted(gemm_backends(weight), key=lambda name: name != "plain")
        tried = (self._choices.choose(weight, None, (backend,)) for backend in backends)
        choice = next((each for each in tried if each is not None), None)
        if choice is None:
            raise InvalidAdapter(
                "adapter: expected the rows of a product to be computed alike, got others for "
                f"{tuple(weight.shape)} in {weight.dtype} on this machine; {SERVE_FAST}"
            )
        return Matmul([weight], None, choice)


def _ranks(parts: Sequence[Part]) -> list[int]:
    """Ranks of some parts, filled up."""
    return [-(-each.low_rank.down.shape[0] // _RANKS) * _RANKS for each in parts]


def _chosen(ranges: Ranges) -> slice | torch.Tensor:
    """Choose rows by a slice if they follow each other, else by indices."""
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.cat([torch.arange(start, end) for start, end in ranges])


def _tiles(down: Matmul, up: Matmul) -> RowTiles | None:
    costs = tuple((size, cost + up.costs[size]) for size, cost in down.costs.items() if size in up.costs)
    return tiles_of(costs) if costs else None


def _add(addition: _Addition, rows: torch.Tensor, columns: torch.Tensor, start: int, end: int) -> None:
    """Add to the columns of the rows `[start, end)` of a matrix as `aligned_rows` lays it out.

    A call has a known number of rows. Where an adapter has fewer, neighbouring rows fill up the call, and their results
    are dropped:

        rows      [ 0 ... start )[ start .. end )[ .... )
        calls           [-- 8 --)[-- 8 --)
                        dropped )[ added )
    """
    down, up, tiles = addition.down, addition.up, addition.tiles
    num_rows = rows.shape[0]
    is_aligned = rows.stride(0) * rows.element_size() % ALIGNMENT_BYTES == 0  # and so is every row of them
    if tiles is None:
        columns[start:end].add_(up(down(rows[start:end])))
        return
    for size in tiles.cover(end - start):
        last = min(start + size, end)
        if size > num_rows:
            columns[start:last].add_(up(down(rows[start:last])))
        else:
            first = min(start, num_rows - size)
            piece = rows[first : first + size]
            added = up.one_call(down.one_call(piece if is_aligned else aligned_rows(piece)))
            columns[start:last].add_(added[start - first : last - first])
        start = last
