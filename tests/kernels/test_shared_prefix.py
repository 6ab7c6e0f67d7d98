"""Blocks that requests share are found, each once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from radixkv.kernels.shared_prefix import prefix_order, runs_in_order

Run = tuple[int, int, tuple[int, ...]]  # first and end unit, and the requests


def shared_runs(tables: list[list[int]], num_units: list[int], blocks_per_unit: int) -> list[Run]:
    """Return the runs of the requests with these block tables."""
    order, same_units = prefix_order(np.array(tables, dtype=np.int32), num_units, blocks_per_unit)
    runs = runs_in_order([num_units[request] for request in order], same_units.tolist())
    return [
        (first_unit, end_unit, tuple(sorted(order[first:end].tolist()))) for first_unit, end_unit, first, end in runs
    ]


def sharing_requests(
    tables: list[list[int]], num_units: list[int], blocks_per_unit: int
) -> dict[tuple[int, int], set[int]]:
    """Return, by request and unit, the requests that have the same blocks up to the end of this unit."""
    sharing: dict[tuple[int, int], set[int]] = {}
    for request in range(len(tables)):
        for unit in range(num_units[request]):
            num_blocks = (unit + 1) * blocks_per_unit
            sharing[request, unit] = {
                other
                for other in range(len(tables))
                if num_units[other] > unit and tables[other][:num_blocks] == tables[request][:num_blocks]
            }
    return sharing


@pytest.mark.parametrize("blocks_per_unit", [1, 3])
def test_each_unit_is_in_one_run_with_all_requests_that_share_it(blocks_per_unit: int) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        tables: list[list[int]] = []
        for _ in range(rng.randint(1, 9)):
            shared = rng.choice(tables)[: rng.randint(0, 12)] if tables and rng.random() < 0.8 else []
            tables.append(shared + [rng.randint(0, 2) for _ in range(12 - len(shared))])
        num_units = [rng.randint(0, 12 // blocks_per_unit) for _ in tables]
        runs = shared_runs(tables, num_units, blocks_per_unit)
        got: dict[tuple[int, int], set[int]] = {}
        for first_unit, end_unit, requests in runs:
            for request in requests:
                for unit in range(first_unit, end_unit):
                    assert (request, unit) not in got, "each unit of a request is in one run"
                    got[request, unit] = set(requests)
        assert got == sharing_requests(tables, num_units, blocks_per_unit)


def test_without_sharing_there_is_one_run_per_request() -> None:
    tables = np.arange(40).reshape(4, 10).tolist()
    assert sorted(shared_runs(tables, [2, 0, 1, 2], 4)) == [(0, 1, (2,)), (0, 2, (0,)), (0, 2, (3,))]


def test_no_units_make_no_runs() -> None:
    assert shared_runs([[0, 0, 0], [0, 0, 0]], [0, 0], 2) == []


def test_a_request_that_ends_inside_a_shared_prefix_shares_it_up_to_its_end() -> None:
    assert shared_runs([[5, 6, 7]] * 3, [3, 1, 3], 1) == [(0, 1, (0, 1, 2)), (1, 3, (0, 2))]


class CountedUnits(list[int]):
    """A list that counts how many of its elements are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        element = super().__getitem__(index)
        self.num_read += len(element) if isinstance(index, slice) else 1
        return element

    def __iter__(self) -> Iterator[int]:
        for element in super().__iter__():
            self.num_read += 1
            yield element


@pytest.mark.parametrize(
    ("num_units", "same_units"),
    [
        (range(1, 1001), range(1, 1000)),
        (range(1000, 0, -1), range(999, 0, -1)),
        ([1000] * 1000, range(999)),
        ([1000] * 1000, range(998, -1, -1)),
    ],
    ids=["each ends where the next goes on", "each goes on where the next ends", "deeper", "shallower"],
)
def test_requests_that_branch_off_one_after_another_are_read_once(num_units: range, same_units: range) -> None:
    counted = CountedUnits(num_units), CountedUnits(same_units)
    runs = runs_in_order(*counted)
    assert sum(each.num_read for each in counted) == 1999
    assert sum((end_unit - first_unit) * (end - first) for first_unit, end_unit, first, end in runs) == sum(num_units)


def test_a_run_precedes_those_that_continue_it_and_those_of_later_requests() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        num_units = [rng.randint(0, 6) for _ in range(rng.randint(1, 12))]
        same_units = [rng.randint(0, min(pair)) for pair in itertools.pairwise(num_units)]
        runs = runs_in_order(num_units, same_units)
        for earlier, later in itertools.combinations(runs, 2):
            continues = (
                earlier.first <= later.first and later.end <= earlier.end and earlier.end_unit <= later.first_unit
            )
            assert continues or earlier.end <= later.first
