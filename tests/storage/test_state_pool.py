from __future__ import annotations

import pytest
import torch

from radixkv.errors import ConfigError
from radixkv.storage.state_pool import StatePool, StateShape

SHAPE = StateShape(num_layers=3, num_inputs=2, num_channels=8, dtype=torch.bfloat16)


def test_a_slot_takes_the_bytes_of_all_layers() -> None:
    pool = StatePool(5, SHAPE, torch.device("cpu"))
    assert SHAPE.slot_bytes == 3 * 2 * 8 * 2
    assert pool.states[: pool.num_slots].nbytes == 5 * SHAPE.slot_bytes


def test_the_state_from_which_sequences_begin_is_zero_and_takes_no_slot() -> None:
    pool = StatePool(5, SHAPE, torch.device("cpu"))
    assert pool.start not in range(pool.num_slots)
    assert not pool.states[pool.start].any()


def test_a_pool_without_slots_still_has_the_state_from_which_sequences_begin() -> None:
    assert StatePool(0, SHAPE, torch.device("cpu")).states.shape == (1, 3, 2, 8)


def test_too_many_slots_are_refused_by_their_bytes() -> None:
    with pytest.raises(
        ConfigError, match=rf"^cache\.state_bytes: {2**50} states need {SHAPE.slot_bytes * 2**50} bytes on cpu"
    ):
        StatePool(2**50, SHAPE, torch.device("cpu"))
