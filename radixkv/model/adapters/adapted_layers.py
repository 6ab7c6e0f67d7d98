"""The linear layers of one model, with what the adapters of a step add to their rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from radixkv.model.adapters.adapter_files import AdapterFiles, adaptable_layers
from radixkv.model.adapters.adapter_set import AdapterRange, AdapterSet
from radixkv.model.adapters.low_rank_matmuls import Part, Ranges
from radixkv.model.layers.packed_linear import PackedLinear, PackedSlice

P = TypeVar("P")


class Products(Protocol[P]):
    """Computes what adapters add, on one kind of device. See `LowRankMatmuls`."""

    def place(self, sites: Mapping[int, Sequence[Part]]) -> P:
        """Lay out an adapter, given its parts by site."""
        ...

    def num_bytes(self, sites: Mapping[int, Sequence[Part]]) -> int:
        """Bytes that an adapter takes once it is laid out."""
        ...

    def begin(self, groups: Sequence[tuple[Ranges, P]]) -> None:
        """Set the adapters of the next forward pass, with the rows of each."""
        ...

    def add(self, site: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add to a site's product with all rows of the forward pass, in place."""
        ...


class _Place(NamedTuple):
    """The columns of a site that are a layer's."""

    site: int
    start: int
    end: int


class AdaptedLayers(Generic[P]):
    """Lets adapters add to the products of a model. Without adapters in a step, products are as they were.

    Args:
        module: the model, in evaluation mode, after its layers were packed and before known parts are joined.
        products: computes what is added.
        max_adapters, max_bytes: see `AdapterSet`.

    Attributes:
        adapters: those that are loaded.
    """

    def __init__(self, module: PreTrainedModel, products: Products[P], max_adapters: int, max_bytes: int) -> None:
        self._products = products
        self.adapters: AdapterSet[P] = AdapterSet(
            self._place, max_adapters, max_bytes, lambda files: products.num_bytes(self._sites(files))
        )
        self._places: dict[str, _Place] = {}
        sites: dict[int, int] = {}  # by identity of what multiplies
        parts = dict(module.named_modules())
        for name in adaptable_layers(module):
            part: Any = parts[name]
            multiplier, start, end = _multiplier_of(part)
            site = sites.setdefault(id(multiplier), len(sites))
            add = partial(products.add, site)
            if isinstance(multiplier, nn.Module):
                vars(multiplier)["forward"] = partial(_added, multiplier, add=add)
            else:
                multiplier.addition = add
            self._places[name] = _Place(site, start, end)

    def try_out(self, files: AdapterFiles) -> None:
        """Lay out an adapter once, and forget it: products of new shapes are tried. May be called on any thread.

        Raises:
            InvalidAdapter: rows of its products are not computed alike on this machine.
        """
        self._place(files)

    @contextlib.contextmanager
    def applied(self, ranges: Sequence[AdapterRange]) -> Iterator[None]:
        """Add the adapters of some rows, inside the `with` block.

        Args:
            ranges: rows of the forward pass, each at most once.

        Raises:
            UnknownAdapter: one of the adapters is not loaded.
        """
        placed = self.adapters.need(each.digest for each in ranges)
        rows: dict[str, list[tuple[int, int]]] = {}
        for digest, start, end in ranges:
            known = rows.setdefault(digest, [])
            if known and known[-1][1] == start:
                start, _ = known.pop()
            known.append((start, end))
        self._products.begin([(each, placed[digest]) for digest, each in rows.items()])
        try:
            yield
        finally:
            self._products.begin(())

    def _place(self, files: AdapterFiles) -> P:
        return self._products.place(self._sites(files))

    def _sites(self, files: AdapterFiles) -> dict[int, list[Part]]:
        """Sort the parts of an adapter by site, and there by column."""
        sites: dict[int, list[Part]] = {}
        for name, low_rank in files.layers.items():
            site, start, end = self._places[name]
            sites.setdefault(site, []).append(Part(start, end, low_rank))
        return {site: sorted(parts, key=lambda part: part.start) for site, parts in sites.items()}


def _multiplier_of(part: Any) -> tuple[Any, int, int]:
    """Find what multiplies for a layer, and the columns there that are the layer's."""
    if isinstance(part, PackedSlice):
        return part.joined.matmul, part.start, part.end
    if isinstance(part, PackedLinear):
        return part.matmul, 0, part.out_features
    return part, 0, part.weight.shape[0] if isinstance(part, nn.Linear) else part.weight.shape[1]


def _added(layer: Any, rows: torch.Tensor, *, add: Any) -> torch.Tensor:
    out: torch.Tensor = type(layer).forward(layer, rows)
    add(rows, out)
    return out
