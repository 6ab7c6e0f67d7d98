"""The ragged batch of one step: several requests, each with a suffix of queries over its own K/V."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.staging import to_device

Ints: TypeAlias = npt.NDArray[np.int64]


class QueryTile(NamedTuple):
    """The query tokens of a request at positions `[start, end)`. The packed row of the first one is `first_token`."""

    request: int
    start: int
    end: int
    first_token: int


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Token rows of one step, and the slots of their K/V in the pool. Built once per step and read by all layers.

    Request `i` owns the packed token rows `[query_starts[i], query_starts[i + 1])`. They are the last rows of a
    sequence of `kv_lens[i]` tokens; the tokens before them are its cached prefix. Position `p` of that sequence is
    stored in block `block_tables[i, p // block_size]` at offset `p % block_size`.

        sequence 0   [ prefix: cached ............ )[ suffix )           kv_lens[0] tokens
        sequence 1   [ prefix )[ suffix )                                kv_lens[1] tokens
        rows         [ suffix of 0 )[ suffix of 1 )                      num_tokens rows

    Attributes:
        query_starts: host ints, `num_requests + 1` of them, from 0 to `num_tokens`.
        kv_lens: host ints, prefix plus suffix of each request, in tokens.
        block_tables: int32 `[num_requests, max_blocks]` on the device, rows padded with block 0.
        slots: int64 `[num_tokens]` on the device: `block_id * block_size + offset` of each packed row.
        block_size: tokens per block.
        host_tables: the block tables on the host; on a CPU in the same memory.
    """

    query_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: torch.Tensor
    slots: torch.Tensor
    block_size: int
    host_tables: npt.NDArray[np.int32]

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Sequence[npt.NDArray[np.int32]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> PagedBatch:
        """Build the batch of one step.

        >>> tables = [np.array([7, 2], dtype=np.int32), np.array([5], dtype=np.int32)]
        >>> batch = PagedBatch.build(query_lens=[3, 1], kv_lens=[20, 4], block_tables=tables, block_size=16)
        >>> batch.query_starts, batch.positions.tolist()
        ((0, 3, 4), [17, 18, 19, 3])
        >>> batch.slots.tolist()
        [33, 34, 35, 83]

        Args:
            query_lens: suffix tokens of each request in this step, each at least 1.
            kv_lens: prefix plus suffix tokens of each request; `kv_lens[i] >= query_lens[i]`.
            block_tables: int32 block ids of each request, at least `ceil(kv_lens[i] / block_size)` of them.
            block_size: tokens per block.
            device: device of the tensors.
        """
        table_blocks = -(-max(kv_lens) // block_size)
        tables = np.zeros((len(kv_lens), table_blocks), dtype=np.int32)
        for row, kv_len, block_ids in zip(tables, kv_lens, block_tables, strict=True):
            num_blocks = -(-kv_len // block_size)
            row[:num_blocks] = block_ids[:num_blocks]
        request, positions = _locate_rows(np.array(query_lens), np.array(kv_lens))
        slots = tables[request, positions // block_size] * np.int64(block_size) + positions % block_size
        batch = cls(
            query_starts=(0, *itertools.accumulate(query_lens)),
            kv_lens=tuple(kv_lens),
            block_tables=torch.from_numpy(tables),
            slots=torch.from_numpy(slots),
            block_size=block_size,
            host_tables=tables,
        )
        return batch.to(torch.device(device))

    def to(self, device: torch.device) -> PagedBatch:
        """Return the same batch with its tensors on a device; see `to_device`."""
        if self.slots.device == device:
            return self
        return dataclasses.replace(
            self, block_tables=to_device(self.block_tables, device), slots=to_device(self.slots, device)
        )

    def query_tiles(self, tile_tokens: int) -> Iterator[QueryTile]:
        """Cut the query tokens of each request at multiples of `tile_tokens` positions.

        >>> batch = PagedBatch.build([3, 1], [20, 4], 2 * [np.zeros(2, dtype=np.int32)], block_size=16)
        >>> for tile in batch.query_tiles(18):
        ...     print(tile)
        QueryTile(request=0, start=17, end=18, first_token=0)
        QueryTile(request=0, start=18, end=20, first_token=1)
        QueryTile(request=1, start=3, end=4, first_token=3)
        """
        for request, kv_len in enumerate(self.kv_lens):
            first_token, end_token = self.query_starts[request], self.query_starts[request + 1]
            prefix_len = kv_len - (end_token - first_token)
            for tile_start in range(prefix_len // tile_tokens * tile_tokens, kv_len, tile_tokens):
                start = max(tile_start, prefix_len)
                end = min(tile_start + tile_tokens, kv_len)
                yield QueryTile(request, start, end, first_token + start - prefix_len)

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return len(self.kv_lens)

    @property
    def max_query_len(self) -> int:
        """Suffix tokens of the request with the longest suffix."""
        return int(self.query_lens.max())

    @property
    def query_lens(self) -> Ints:
        """Suffix tokens of each request, `[num_requests]` on the host."""
        starts: Ints = np.array(self.query_starts)
        return starts[1:] - starts[:-1]

    @property
    def positions(self) -> Ints:
        """Position of each packed token row in its own sequence, `[num_tokens]` on the host."""
        return _locate_rows(self.query_lens, np.array(self.kv_lens))[1]

    @property
    def num_tokens(self) -> int:
        """Packed token rows in the batch."""
        return self.query_starts[-1]


def repeat_indices(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat each index `counts[index]` times. Returns the indices, and for each the number of times it came before.

    >>> index, nth = repeat_indices(np.array([2, 0, 3]))
    >>> index.tolist(), nth.tolist()
    ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
    """
    index = np.repeat(np.arange(counts.size), counts)
    return index, np.arange(index.size) - (np.cumsum(counts) - counts)[index]


def _locate_rows(query_lens: Ints, kv_lens: Ints) -> tuple[Ints, Ints]:
    """Return the index of the request of each packed token row, and the row's position in that request's sequence."""
    request, nth = repeat_indices(query_lens)
    return request, (kv_lens - query_lens)[request] + nth
