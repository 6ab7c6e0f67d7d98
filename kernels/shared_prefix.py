"""Finds the blocks that requests of one step share, so that attention reads them once.

request 0   [ system prompt )[ document ......... )[ own )
request 1   [ system prompt )[ document ......... )[ own )
request 2   [ system prompt )[ own )

runs        [ 0, 1, 2       )[ 0, 1 ............. )          and one run per request for its own blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class OrderedRun(NamedTuple):
    """A range of units that the same requests have in common. A unit is a fixed number of consecutive blocks.

    Attributes:
        first_unit, end_unit: the units, half open.
        first, end: the requests whose block tables agree up to `end_unit`: positions in `prefix_order`, half open.
    """

    first_unit: int
    end_unit: int
    first: int
    end: int


def prefix_order(
    tables: npt.NDArray[np.int32], num_units: Sequence[int] | npt.NDArray[np.int64], blocks_per_unit: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sort requests so that requests with a common prefix are adjacent.

    Only block ids are compared: requests with equal tokens in different blocks share nothing.

    Args:
        tables: `[num_requests, max_blocks]`, the blocks of each request; at least one request.
        num_units: number of units of each request to group, all of them within its table.
        blocks_per_unit: consecutive blocks that are shared together or not at all.

    Returns:
        The requests in order, `[num_requests]`, and the number of units that each has in common with the next one,
        `[num_requests - 1]`.

    Complexity: O(num_requests x log(num_requests) x max_blocks), in numpy.
    """
    counts = np.asarray(num_units, dtype=np.int64)
    max_counted_blocks = max(1, int(counts.max()) * blocks_per_unit)
    is_counted = np.arange(max_counted_blocks) < counts[:, None] * blocks_per_unit
    counted_blocks = np.where(is_counted, tables[:, :max_counted_blocks], np.int32(-1))
    # Each row is sorted as one value, of all its bytes.
    order = np.argsort(
        counted_blocks.view(np.dtype((np.void, max_counted_blocks * counted_blocks.itemsize)))[:, 0], kind="stable"
    )
    differs = counted_blocks[order[1:]] != counted_blocks[order[:-1]]
    same_blocks = np.where(differs.any(axis=1), differs.argmax(axis=1), max_counted_blocks)
    ordered_counts = counts[order]
    return order, np.minimum(same_blocks // blocks_per_unit, np.minimum(ordered_counts[1:], ordered_counts[:-1]))


def runs_in_order(num_units: Sequence[int], same_units: Sequence[int]) -> list[OrderedRun]:
    """Group the units of requests, which are in the order of `prefix_order`, into runs.

    Each unit of each request is in exactly one run, together with all requests that have the same blocks in this unit
    and in all units before it. A run precedes those that continue it.

    >>> tables, num_units = np.array([[7, 2, 5, 1], [7, 2, 4, 0], [7, 2, 5, 3]], dtype=np.int32), [4, 3, 3]
    >>> order, same_units = prefix_order(tables, num_units, blocks_per_unit=1)
    >>> for run in runs_in_order([num_units[i] for i in order], same_units.tolist()):
    ...     print(run.first_unit, run.end_unit, order[run.first : run.end])
    0 2 [1 0 2]
    2 3 [1]
    2 3 [0 2]
    3 4 [0]

    Complexity: O(num_requests x log(num_requests)). There are at most twice as many runs as requests.

    Args:
        num_units: number of units of each request, in that order; at least one request.
        same_units: number of units that each request has in common with the next one, from `prefix_order`.
    """
    runs: list[OrderedRun] = []
    # The runs that include the current request, each as its end unit and its first request. A run begins where the
    # one before it ends. The first one, without units, stays.
    open_runs = [(0, 0)]
    for request, (end_unit, num_shared) in enumerate(zip(num_units, [*same_units, 0], strict=True)):
        if end_unit > open_runs[-1][0]:
            open_runs.append((end_unit, request))
        while open_runs[-1][0] > num_shared:  # the next request does not have all units of this run
            run_end, first = open_runs.pop()
            run_start = max(open_runs[-1][0], num_shared)
            runs.append(OrderedRun(run_start, run_end, first, request + 1))
            if open_runs[-1][0] < num_shared:  # it has some of them, which are a run of their own
                open_runs.append((num_shared, first))
    return sorted(runs, key=attrgetter("first", "first_unit"))
