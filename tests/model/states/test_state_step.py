from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.nn import functional

from radixkv.model.states.state_step import StateRows, StateStep, convolve
from radixkv.storage.state_pool import StatePool, StateShape

CHANNELS, INPUTS = 24, 2
WEIGHT, BIAS = torch.randn(2, CHANNELS, INPUTS + 1), torch.randn(CHANNELS)


def pool_of(dtype: torch.dtype, num_slots: int = 6) -> StatePool:
    pool = StatePool(num_slots, StateShape(2, INPUTS, CHANNELS, dtype), torch.device("cpu"))
    pool.states[:num_slots] = float("nan")  # nothing may depend on what was never written
    return pool


def run(
    pool: StatePool, chunks: list[tuple[torch.Tensor, int, list[tuple[int, int]]]], weight: torch.Tensor = WEIGHT
) -> list[torch.Tensor]:
    """Convolve chunks in one step of two layers. Returns the output of each, `[2, num_rows, CHANNELS]`.

    Args:
        pool: the states.
        chunks: the rows `[2, num_rows, CHANNELS]` of each chunk, the slot of the state before it, and the states to
            keep: the number of rows after which, and the slot.
        weight: the weight of each layer.
    """
    starts = [0, *itertools.accumulate(rows.shape[1] for rows, _, _ in chunks)]
    writes = [(index, end, slot) for index, (_, _, kept) in enumerate(chunks) for end, slot in kept]
    step = StateStep(pool, StateRows.build(starts, [source for _, source, _ in chunks], writes, INPUTS))
    packed = torch.cat([rows for rows, _, _ in chunks], 1)
    outputs = [step.convolve(layer, packed[layer], weight[layer].to(packed), BIAS.to(packed)) for layer in range(2)]
    step.keep()
    return list(torch.stack(outputs).split([rows.shape[1] for rows, _, _ in chunks], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_a_causal_convolution(dtype: torch.dtype) -> None:
    pool, rows = pool_of(dtype), torch.randn(2, 37, CHANNELS).to(dtype)
    (got,) = run(pool, [(rows, pool.start, [])])
    for layer in range(2):
        inputs, weight = rows[layer].T[None], WEIGHT[layer].to(dtype)[:, None]
        expected = functional.conv1d(
            inputs.float(), weight.float(), BIAS.to(dtype).float(), padding=INPUTS, groups=CHANNELS
        )
        torch.testing.assert_close(got[layer], expected[0, :, :37].T.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_chunks_or_on_other_requests(dtype: torch.dtype) -> None:
    pool = pool_of(dtype)
    mine, other = torch.randn(2, 40, CHANNELS).to(dtype), torch.randn(2, 40, CHANNELS).to(dtype)
    (whole,) = run(pool, [(mine, pool.start, [(16, 3), (17, 4), (40, 5)])])
    states = pool.states.clone()
    run(pool, [(other[:, :9], pool.start, [(9, 1)])])
    outputs, source = [], pool.start
    for start, end in itertools.pairwise([0, 1, 2, 16, 17, 33, 40]):
        my_chunk = (mine[:, start:end], source, [(end - start, 0)])
        _, my_output, _ = run(pool, [(other[:, 9:12], 1, []), my_chunk, (other[:, :1], pool.start, [])])
        outputs.append(my_output)
        source = 0
        if end in (16, 17, 40):
            assert torch.equal(pool.states[0], states[{16: 3, 17: 4, 40: 5}[end]])
    assert torch.equal(torch.cat(outputs, 1), whole)
    (resumed,) = run(pool, [(mine[:, 16:], 3, [])])
    assert torch.equal(resumed, whole[:, 16:])


def test_an_unfinished_step_does_not_change_states() -> None:
    pool, rows = pool_of(torch.float32), torch.randn(2, 5, CHANNELS)
    run(pool, [(rows, pool.start, [(5, 0)])])
    before = pool.states.clone()
    step = StateStep(pool, StateRows.build([0, 5], [0], [(0, 5, 0)], INPUTS))
    step.convolve(0, rows[0], WEIGHT[0], None)
    assert torch.equal(pool.states.nan_to_num(7), before.nan_to_num(7))


def test_non_finite_rows_are_reported() -> None:
    pool, rows = pool_of(torch.float32), torch.randn(2, 5, CHANNELS)
    rows[0, 3, 7] = float("inf")
    rows[1, 1, 2] = float("nan")
    step = StateStep(pool, StateRows.build([0, 5], [pool.start], [], INPUTS))
    assert step.is_finite is None
    for layer in range(2):
        step.convolve(layer, rows[layer], WEIGHT[layer], None)
    assert step.is_finite is not None
    assert step.is_finite.tolist() == [True, False, True, False, True]


def test_products_in_half_precision_are_added_up_in_float32() -> None:
    inputs = [torch.full((1, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert convolve(inputs, torch.ones(1, 3, dtype=torch.bfloat16), None).item() == 258.0


@pytest.mark.parametrize("num_inputs", [1, 2, 3, 5])
def test_each_row_sees_the_last_inputs_of_its_own_sequence(num_inputs: int) -> None:
    """An input is identified by its request and its position, which is negative for those of the state."""
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
        for (request, end, slot), written, target in zip(
            writes, rows.written_inputs.tolist(), rows.targets.tolist(), strict=True
        ):
            assert [joined[index] for index in written] == [(request, end - lag) for lag in range(num_inputs, 0, -1)]
            assert target == slot


def test_a_step_may_keep_no_state() -> None:
    rows = StateRows.build([0, 2], [3], [], 2).to(torch.device("cpu"))
    assert rows.written_inputs.shape == (0, 2)
    assert rows.targets.shape == (0,)
    assert rows.sources.tolist() == [3]
