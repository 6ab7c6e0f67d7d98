"""The blocks that requests share are found, each once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.kernels.shared_prefix import SharedRun, shared_runs


def _by_definition(
    tables: list[list[int]], num_units: list[int], blocks_a_unit: int
) -> dict[tuple[int, int], set[int]]:
    """Return the requests that share each unit of each request."""
    return {
        (request, unit): {
            other
            for other, table in enumerate(tables)
            if num_units[other] > unit
            and table[: (unit + 1) * blocks_a_unit] == tables[request][: (unit + 1) * blocks_a_unit]
        }
        for request, count in enumerate(num_units)
        for unit in range(count)
    }


@pytest.mark.parametrize("blocks_a_unit", [1, 3])
def test_each_unit_is_in_one_run_with_all_that_share_it(blocks_a_unit: int) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        tables: list[list[int]] = []
        for _ in range(rng.randint(1, 9)):
            base = rng.choice(tables)[: rng.randint(0, 12)] if tables and rng.random() < 0.8 else []
            tables.append(base + [rng.randint(0, 2) for _ in range(12 - len(base))])
        num_units = [rng.randint(0, 12 // blocks_a_unit) for _ in tables]
        runs = shared_runs(np.array(tables, dtype=np.int32), num_units, blocks_a_unit)
        got: dict[tuple[int, int], set[int]] = {}
        for run in runs:
            for request in run.requests:
                for unit in range(run.first_unit, run.end_unit):
                    assert (request, unit) not in got, "one run a unit"
                    got[request, unit] = set(run.requests)
        assert got == _by_definition(tables, num_units, blocks_a_unit)


def test_nothing_shared_is_one_run_a_request() -> None:
    tables = np.arange(40, dtype=np.int32).reshape(4, 10)
    assert sorted(shared_runs(tables, [2, 0, 1, 2], 4), key=lambda run: run.requests) == [
        SharedRun(0, 2, (0,)),
        SharedRun(0, 1, (2,)),
        SharedRun(0, 2, (3,)),
    ]


def test_no_units_make_no_runs() -> None:
    assert shared_runs(np.zeros((2, 3), dtype=np.int32), [0, 0], 2) == []


def test_a_request_that_ends_inside_what_others_share_is_among_them_up_to_there() -> None:
    tables = np.array([[5, 6, 7], [5, 6, 7], [5, 6, 7]], dtype=np.int32)
    assert shared_runs(tables, [3, 1, 3], 1) == [SharedRun(0, 1, (0, 1, 2)), SharedRun(1, 3, (0, 2))]
