"""Adds the low-rank updates of a step's adapters to the outputs of a model's linear layers.

A site is one matmul of the model, of a linear layer or of several merged ones. Sites are identified by their index.
"""

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
from radixkv.model.adapters.low_rank_matmuls import ColumnUpdate, Ranges
from radixkv.model.layers.packed_linear import PackedLinear, PackedSlice

P = TypeVar("P")  # an adapter that a backend has packed


class LowRankBackend(Protocol[P]):
    """Computes low-rank updates on one kind of device: `LowRankMatmuls` on a CPU, `LowRankKernels` on a GPU."""

    def pack(self, sites: Mapping[int, Sequence[ColumnUpdate]]) -> P:
        """Pack an adapter for the device, given its updates by site."""
        ...

    def num_bytes(self, sites: Mapping[int, Sequence[ColumnUpdate]]) -> int:
        """Return the bytes that an adapter takes after `pack`."""
        ...

    def set_adapters(self, groups: Sequence[tuple[Ranges, P]]) -> None:
        """Set the adapters of the next forward pass, with the rows of each."""
        ...

    def add(self, site: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the updates to the output of a site's matmul for all rows of the forward pass, in place."""
        ...


class _SiteColumns(NamedTuple):
    """The range of a site's output columns that belongs to one layer."""

    site: int
    start: int
    end: int


class AdaptedLayers(Generic[P]):
    """Hooks adapters into the linear layers of a model. A step without adapters computes the base model.

    Args:
        module: the model, in evaluation mode, after its layers were packed and before known parts are fused.
        backend: computes the low-rank updates.
        max_adapters, max_bytes: see `AdapterSet`.

    Attributes:
        adapters: the loaded adapters.
    """

    def __init__(self, module: PreTrainedModel, backend: LowRankBackend[P], max_adapters: int, max_bytes: int) -> None:
        self._backend = backend
        self.adapters: AdapterSet[P] = AdapterSet(
            self._pack, max_adapters, max_bytes, lambda files: backend.num_bytes(self._updates_by_site(files))
        )
        self._site_columns: dict[str, _SiteColumns] = {}
        sites: dict[int, int] = {}  # by the `id` of the matmul
        parts = dict(module.named_modules())
        for name in adaptable_layers(module):
            part: Any = parts[name]
            matmul, start, end = _matmul_of(part)
            site = sites.setdefault(id(matmul), len(sites))
            add = partial(backend.add, site)
            if isinstance(matmul, nn.Module):
                vars(matmul)["forward"] = partial(_forward_with_adapters, matmul, add=add)
            else:
                matmul.addition = add
            self._site_columns[name] = _SiteColumns(site, start, end)

    def try_out(self, files: AdapterFiles) -> None:
        """Pack an adapter and discard the result, which checks matmuls of new shapes. May be called on any thread.

        Raises:
            InvalidAdapter: its matmuls are not batch-invariant on this machine, or a GPU does not support its rank.
        """
        self._pack(files)

    @contextlib.contextmanager
    def applied(self, ranges: Sequence[AdapterRange]) -> Iterator[None]:
        """Apply adapters to some rows, inside the `with` block.

        Args:
            ranges: disjoint ranges of rows of the forward pass, with their adapters.

        Raises:
            UnknownAdapter: one of the adapters is not loaded.
        """
        packed = self.adapters.put_on_device(each.digest for each in ranges)
        merged_ranges: dict[str, list[tuple[int, int]]] = {}  # by digest
        for digest, start, end in ranges:
            earlier_ranges = merged_ranges.setdefault(digest, [])
            if earlier_ranges and earlier_ranges[-1][1] == start:
                start, _ = earlier_ranges.pop()
            earlier_ranges.append((start, end))
        self._backend.set_adapters([(row_ranges, packed[digest]) for digest, row_ranges in merged_ranges.items()])
        try:
            yield
        finally:
            self._backend.set_adapters(())

    def _pack(self, files: AdapterFiles) -> P:
        return self._backend.pack(self._updates_by_site(files))

    def _updates_by_site(self, files: AdapterFiles) -> dict[int, list[ColumnUpdate]]:
        """Group the updates of an adapter by site, in the order of their columns."""
        updates_by_site: dict[int, list[ColumnUpdate]] = {}
        for name, low_rank in files.layers.items():
            site, start, end = self._site_columns[name]
            updates_by_site.setdefault(site, []).append(ColumnUpdate(start, end, low_rank))
        for updates in updates_by_site.values():
            updates.sort(key=lambda update: update.start)
        return updates_by_site


def _matmul_of(part: Any) -> tuple[Any, int, int]:
    """Return the matmul that computes a layer, and the range of its output columns that belongs to the layer."""
    if isinstance(part, PackedSlice):
        return part.joined.matmul, part.start, part.end
    if isinstance(part, PackedLinear):
        return part.matmul, 0, part.out_features
    # The weight of the other class, `Conv1D`, is transposed.
    out_features = part.weight.shape[0] if isinstance(part, nn.Linear) else part.weight.shape[1]
    return part, 0, out_features


def _forward_with_adapters(layer: Any, rows: torch.Tensor, *, add: Any) -> torch.Tensor:
    out: torch.Tensor = type(layer).forward(layer, rows)
    add(rows, out)
    return out
