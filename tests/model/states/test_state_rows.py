from __future__ import annotations

import random

import pytest
import torch

from radixkv.model.states.state_rows import StateRows


@pytest.mark.parametrize("num_inputs", [1, 2, 3, 5])
def test_each_row_sees_the_last_inputs_of_its_own_sequence(num_inputs: int) -> None:
    """Random steps, compared with sequences that are written out. An input is named by its request and position."""
    rng = random.Random(num_inputs)
    for _ in range(50):
        lengths = [rng.choice((1, 2, rng.randint(1, 9))) for _ in range(rng.randint(1, 5))]
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        writes = [(index, rng.randint(1, n), 10 + index) for index, n in enumerate(lengths) if rng.random() < 0.7]
        rows = StateRows.build(starts, [7] * len(lengths), writes, num_inputs)
        kept = [(index, position) for index in range(len(lengths)) for position in range(-num_inputs, 0)]
        new = [(index, position) for index, n in enumerate(lengths) for position in range(n)]
        joined = [*kept, *new]
        for row, (request, position) in enumerate(new):
            seen = [joined[index] for index in rows.inputs[:, row].tolist()]
            assert seen == [(request, position - lag) for lag in range(num_inputs, -1, -1)]
        for (request, end, slot), left, target in zip(writes, rows.left.tolist(), rows.targets.tolist(), strict=True):
            assert [joined[index] for index in left] == [(request, end - lag) for lag in range(num_inputs, 0, -1)]
            assert target == slot


def test_a_step_may_leave_no_state() -> None:
    rows = StateRows.build([0, 2], [3], [], 2).to(torch.device("cpu"))
    assert rows.left.shape == (0, 2)
    assert rows.targets.shape == (0,)
    assert rows.sources.tolist() == [3]
