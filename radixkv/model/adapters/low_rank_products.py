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
from radixkv.model.adapters.adapter_files import LowRank
from radixkv.model.products.choices import ProductChoices
from radixkv.model.products.packed_linear import Product
from radixkv.model.refusals import SERVE_FAST

# Ranks are filled up with zeros to a multiple of this, so that few shapes have to be tried.
_RANKS = 8


class Part(NamedTuple):
    """Additions of an adapter to the columns `[start, end)` of a site."""

    start: int
    end: int
    low_rank: LowRank


class _Addition(NamedTuple):
    """Additions of an adapter to a site: to the columns from `start` on."""

    start: int
    down: Product
    up: Product


# An adapter laid out for products, by site.
Placed = Mapping[int, _Addition]


class LowRankProducts:
    """Lays out adapters, and adds them to rows.

    Args:
        choices: how products are computed; in exact mode so that a row's bits do not depend on other rows.
    """

    def __init__(self, choices: ProductChoices) -> None:
        self._choices = choices
        self._groups: list[tuple[slice | torch.Tensor, Placed]] = []

    def place(self, sites: Mapping[int, Sequence[Part]]) -> Placed:
        """Lay out an adapter. Shapes that were not tried before are tried, which takes a tenth of a second each.

        Args:
            sites: its parts by site, in the order of their columns.

        Raises:
            InvalidAdapter: rows of its products are not computed alike on this machine.
        """
        return {site: self._joined(parts) for site, parts in sites.items()}

    def begin(self, groups: Sequence[tuple[slice | torch.Tensor, Placed]]) -> None:
        """Set the adapters of the next forward pass, with the rows of each: a slice, or int64 indices."""
        self._groups = list(groups)

    def add(self, site: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add what the adapters of the forward pass add at a site.

        Args:
            site: an index.
            rows: `[..., in_features]`, all rows of the forward pass.
            out: contiguous `[..., out_features]`, the model's product with them; changed in place.
        """
        if not self._groups:
            return
        flat, whole = rows.reshape(-1, rows.shape[-1]), out.view(-1, out.shape[-1])
        with torch._C.DisableTorchFunction():  # these products are exact by themselves
            for chosen, placed in self._groups:
                addition = placed.get(site)
                if addition is None:
                    continue
                added = addition.up(addition.down(flat[chosen]))
                columns = whole[:, addition.start : addition.start + added.shape[1]]
                if isinstance(chosen, slice):
                    columns[chosen].add_(added)
                else:
                    columns.index_add_(0, chosen, added)

    def _joined(self, parts: Sequence[Part]) -> _Addition:
        start, end = parts[0].start, parts[-1].end
        ranks = [-(-each.low_rank.down.shape[0] // _RANKS) * _RANKS for each in parts]
        like = parts[0].low_rank.down
        down, up = like.new_zeros(sum(ranks), like.shape[1]), like.new_zeros(end - start, sum(ranks))
        first = 0
        for part, rank in zip(parts, ranks, strict=True):
            last = first + part.low_rank.down.shape[0]
            down[first:last] = part.low_rank.down
            up[part.start - start : part.end - start, first:last] = part.low_rank.up
            first += rank
        return _Addition(start, self._product(down), self._product(up))

    def _product(self, weight: torch.Tensor) -> Product:
        choice = self._choices.choose(weight, None)
        if choice is None:
            raise InvalidAdapter(
                "adapter: expected the rows of a product to be computed alike, got others for "
                f"{tuple(weight.shape)} in {weight.dtype} on this machine; {SERVE_FAST}"
            )
        return Product(weight, None, choice)
