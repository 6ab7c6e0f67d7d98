"""Finds the blocks that requests of one step share, so that attention reads them once.

request 0   [ system prompt )[ document ......... )[ own )
request 1   [ system prompt )[ document ......... )[ own )
request 2   [ system prompt )[ own )

runs        [ 0, 1, 2       )[ 0, 1 ............. )          and whatever else is whole of a request's own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class OrderedRun(NamedTuple):
    """Units of consecutive blocks that the same requests begin with.

    Attributes:
        first_unit, end_unit: the units, half open.
        first, end: the requests whose tables agree up to `end_unit`: places in `prefix_order`, half open.
    """

    first_unit: int
    end_unit: int
    first: int
    end: int


def prefix_order(
    tables: npt.NDArray[np.int32], num_units: Sequence[int] | npt.NDArray[np.int64], blocks_a_unit: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sort requests so that those which share a prefix follow each other, the longer ones first.

    Two requests that hold equal tokens in different blocks share nothing.

    Args:
        tables: `[num_requests, max_blocks]`, the blocks of each request; at least one request.
        num_units: units of each request to group, none of which reaches past its table.
        blocks_a_unit: consecutive blocks that are shared together or not at all.

    Returns:
        The requests in order, `[num_requests]`, and how many units each has in common with the next one,
        `[num_requests - 1]`.

    Complexity: O(num_requests x max_blocks), in numpy.
    """
    counts = np.asarray(num_units, dtype=np.int64)
    width = max(1, int(counts.max()) * blocks_a_unit)
    is_counted = np.arange(width) < counts[:, None] * blocks_a_unit
    used = np.where(is_counted, tables[:, :width], np.int32(-1))
    order = np.argsort(used.view(np.dtype((np.void, width * used.itemsize)))[:, 0], kind="stable")
    differs = used[order[1:]] != used[order[:-1]]
    same_blocks = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    ordered = counts[order]
    return order, np.minimum(same_blocks // blocks_a_unit, np.minimum(ordered[1:], ordered[:-1]))


def runs_in_order(num_units: Sequence[int], same_units: Sequence[int]) -> list[OrderedRun]:
    """Group the first units of requests in `prefix_order`.

    Each unit of each request is in exactly one run, together with all requests that have the same blocks there and
    everywhere before. A run comes before those that continue it.

    >>> tables, num_units = np.array([[7, 2, 5, 1], [7, 2, 4, 0], [7, 2, 5, 3]], dtype=np.int32), [4, 3, 3]
    >>> order, same_units = prefix_order(tables, num_units, blocks_a_unit=1)
    >>> for run in runs_in_order([num_units[i] for i in order], same_units.tolist()):
    ...     print(run.first_unit, run.end_unit, order[run.first : run.end])
    0 2 [1 0 2]
    2 3 [1]
    2 3 [0 2]
    3 4 [0]

    Complexity: O(num_requests + runs).

    Args:
        num_units: units of each request, in that order; at least one request.
        same_units: how many of them each request shares with the next one.
    """
    runs: list[OrderedRun] = []
    todo = [(0, len(num_units), 0)]
    while todo:
        first, end, start = todo.pop()
        common = min(same_units[first : end - 1], default=num_units[first])
        if common > start:
            runs.append(OrderedRun(start, common, first, end))
        if end - first == 1:
            continue
        cut = end
        for last in range(end - 2, first - 1, -1):  # from the end, so that the first part is taken up first
            if same_units[last] == common:
                todo.append((last + 1, cut, common))
                cut = last + 1
        todo.append((first, cut, common))
    return runs
