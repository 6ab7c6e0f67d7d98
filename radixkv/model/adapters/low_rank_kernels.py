"""Applies adapters on a GPU: one kernel launch per layer for all adapters of a step that are padded to the same rank.

A site is a matmul of the model that adapters can change, identified by its index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixkv.errors import InvalidAdapter
from radixkv.kernels.gpu.low_rank import RANKS, LowRankStep, add_low_rank, low_rank_rows_agree, padded_rank
from radixkv.model.adapters.low_rank_matmuls import ColumnUpdate, Ranges
from radixkv.model.refusals import SERVE_FAST


class PackedWeights(NamedTuple):
    """An adapter on the device.

    Attributes:
        rank: the rank that its weights are padded to.
        weights: `down` and `up` by site; `addresses` point into them.
        addresses: int64 `[last site + 1, 2]`, 0 for a site that the adapter does not change.
    """

    rank: int
    weights: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    addresses: npt.NDArray[np.int64]


class _Launch(NamedTuple):
    """The adapters of a step that are padded to the same rank, and the sites that any of them changes."""

    rank: int
    step: LowRankStep
    sites: frozenset[int]


class LowRankKernels:
    """Copies adapters to a GPU, and applies them to rows.

    Args:
        device: device of the model.
        is_exact: whether results must be batch-invariant.
    """

    def __init__(self, device: torch.device, *, is_exact: bool) -> None:
        self._device = device
        self._is_exact = is_exact
        self._tried: set[tuple[object, ...]] = set()  # dtype and shapes
        self._launches: list[_Launch] = []

    def pack(self, sites: Mapping[int, Sequence[ColumnUpdate]]) -> PackedWeights:
        """Copy an adapter to the device. Kernels for new shapes are compiled and checked.

        Args:
            sites: its updates by site, one for each: on a GPU, no layers are merged if adapters may be loaded.

        Raises:
            InvalidAdapter: its rank is too large, or the kernel is not batch-invariant on this GPU.
        """
        rank = _padded_rank(sites)
        weights = {}
        addresses = np.zeros((max(sites) + 1, 2), dtype=np.int64)
        for site, (update,) in sites.items():
            down, up = weights[site] = self._pad(update, rank)
            addresses[site] = down.data_ptr(), up.data_ptr()
            self._check_kernel(down, up)
        return PackedWeights(rank, weights, addresses)

    def num_bytes(self, sites: Mapping[int, Sequence[ColumnUpdate]]) -> int:
        """Return the bytes that an adapter takes on the device. Raises InvalidAdapter if its rank is too large."""
        rank = _padded_rank(sites)
        return sum(
            rank * (low_rank.down.shape[1] + low_rank.up.shape[0]) * low_rank.down.element_size()
            for updates in sites.values()
            for _, _, low_rank in updates
        )

    def set_adapters(self, groups: Sequence[tuple[Ranges, PackedWeights]]) -> None:
        """Set the adapters of the next forward pass, with the rows of each. Does not wait for the device."""
        self._launches = []
        for rank in sorted({packed.rank for _, packed in groups}):
            same_rank = [group for group in groups if group[1].rank == rank]
            num_sites = max(len(packed.addresses) for _, packed in same_rank)
            addresses = np.zeros((num_sites, len(same_rank), 2), dtype=np.int64)
            for index, (_, packed) in enumerate(same_rank):
                addresses[: len(packed.addresses), index] = packed.addresses
            step = LowRankStep.build([ranges for ranges, _ in same_rank], addresses, self._device)
            sites = frozenset().union(*(packed.weights.keys() for _, packed in same_rank))
            self._launches.append(_Launch(rank, step, sites))

    def add(self, site: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the updates of the forward pass's adapters at a site; see `LowRankMatmuls.add`."""
        for rank, step, sites in self._launches:
            if site in sites:
                with torch._C.DisableTorchFunction():  # the kernel is exact by itself
                    add_low_rank(rows, out, step, site, rank)

    def _pad(self, update: ColumnUpdate, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        down, up = update.low_rank.down, update.low_rank.up
        padded_down, padded_up = down.new_zeros(rank, down.shape[1]), up.new_zeros(up.shape[0], rank)
        padded_down[: down.shape[0]], padded_up[:, : down.shape[0]] = down, up
        return padded_down.to(self._device), padded_up.to(self._device)

    def _check_kernel(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """Launch the kernel once for new shapes or a new dtype, which compiles it. In exact mode, check that it is
        batch-invariant.
        """
        key = (down.dtype, *down.shape, *up.shape)
        if key in self._tried:
            return
        if not low_rank_rows_agree(down, up) and self._is_exact:
            raise InvalidAdapter(
                f"adapter: the kernel for shapes {tuple(down.shape)} and {tuple(up.shape)} in {down.dtype} is not "
                f"batch-invariant on this GPU; {SERVE_FAST}"
            )
        self._tried.add(key)


def _padded_rank(sites: Mapping[int, Sequence[ColumnUpdate]]) -> int:
    """Return the rank that all weights of an adapter are padded to.

    Raises:
        InvalidAdapter: the largest rank of the adapter is too large.
    """
    largest = max(update.low_rank.down.shape[0] for updates in sites.values() for update in updates)
    rank = padded_rank(largest)
    if rank is None:
        raise InvalidAdapter(f"adapter: expected a rank of at most {RANKS[-1]} on a GPU, got {largest}")
    return rank
