"""Blocks that requests share are found, each once."""

from __future__ import annotations

import random

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
