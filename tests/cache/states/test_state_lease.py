from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache.states.state_lease import StateLease
from radixkv.cache.states.state_slots import StateSlots

BLOCKS = np.arange(16, dtype=np.int32)


def lease_of(slots: StateSlots, num_prompt_tokens: int, found_tokens: int = 0) -> StateLease:
    cached_tokens = slots.longest(BLOCKS, min(found_tokens, num_prompt_tokens - 1))
    return slots.open(BLOCKS, cached_tokens, num_prompt_tokens, found_tokens)


def slots_of(num_snapshots: int = 16, every_tokens: int = 16) -> StateSlots:
    return StateSlots(BLOCKS.size, 4, 3, num_snapshots, every_tokens)


def compute(
    lease: StateLease, start: int, end: int, num_published_blocks: int | None = None, *, keeps: bool = True
) -> list[int]:
    """Compute tokens and publish their whole blocks. Returns where states were kept, the end excepted."""
    writes = lease.writes(start, end, keeps=keeps)
    assert writes[-1] == (end, lease.slot)
    assert len({slot for _, slot in writes}) == len(writes)
    lease.advance(end)
    lease.publish(BLOCKS, end // 4 if num_published_blocks is None else num_published_blocks)
    return [position for position, _ in writes[:-1]]


@pytest.mark.parametrize(
    ("num_tokens", "found_tokens", "expected"),
    [
        (1, 0, []),
        (4, 0, [4]),
        (5, 0, [4]),
        (40, 0, [16, 32, 36, 40]),
        (41, 0, [16, 32, 40]),
        (41, 27, [16, 24, 32, 40]),
        (41, 60, [16, 32, 40]),
    ],
)
def test_a_prompt_keeps_its_end_its_branch_and_a_state_every_so_often(
    num_tokens: int, found_tokens: int, expected: list[int]
) -> None:
    assert compute(lease_of(slots_of(), num_tokens, found_tokens), 0, num_tokens) == expected


@pytest.mark.parametrize("size", [1, 3, 4, 7, 18])
def test_chunks_keep_the_same_states(size: int) -> None:
    lease, kept = lease_of(slots_of(), 41, 27), []
    for start in range(0, 41, size):
        kept += compute(lease, start, min(41, start + size))
    assert kept == [16, 24, 32, 40]


def test_a_state_that_another_request_waits_for_is_kept() -> None:
    lease = lease_of(slots_of(), 41)
    assert compute(lease, 0, 10) == []
    assert lease.want(12)
    assert compute(lease, 10, 20) == [12, 16]


def test_an_answer_keeps_its_newest_state_alone() -> None:
    slots = slots_of()
    lease = lease_of(slots, 10)
    compute(lease, 0, 10)
    for start in range(10, 30):
        compute(lease, start, start + 1)
    assert np.flatnonzero(slots.table >= 0).tolist() == [1, 6], "after 8 tokens of the prompt, and after 28"
    lease.close()
    slots.check(np.empty(0, dtype=np.int32))


def test_an_answer_that_is_computed_again_keeps_one_state_a_step() -> None:
    assert compute(lease_of(slots_of(), 10), 0, 30) == [8, 28]


def test_nothing_is_published_beyond_the_blocks_of_the_tree() -> None:
    slots = slots_of()
    lease = lease_of(slots, 41)
    compute(lease, 0, 41, num_published_blocks=5)
    assert slots.longest(BLOCKS, 41) == 16
    assert len(lease.pending_slots) == 2
    lease.publish(BLOCKS, 10)
    assert slots.longest(BLOCKS, 41) == 40


def test_states_of_a_step_that_was_not_computed_are_not_published() -> None:
    slots = slots_of()
    lease = lease_of(slots, 41)
    compute(lease, 0, 20)
    lease.writes(20, 41, keeps=True)  # the step fails, and a shorter one is tried
    lease.publish(BLOCKS, 10)
    assert slots.longest(BLOCKS, 41) == 16
    assert compute(lease, 20, 35) == [32]
    assert slots.longest(BLOCKS, 41) == 32
    lease.close()
    lease.close()
    slots.check(np.empty(0, dtype=np.int32))
    assert slots.num_kept == 2


def test_a_request_that_publishes_nothing_takes_no_slots() -> None:
    slots = slots_of(num_snapshots=0)
    assert compute(lease_of(slots, 41), 0, 41, keeps=False) == []


def test_without_room_a_request_keeps_what_it_can() -> None:
    slots = slots_of(num_snapshots=1)
    lease = lease_of(slots, 41)
    assert compute(lease, 0, 20) == [16]
    assert compute(lease, 20, 41) == [32]
    assert (slots.num_given_up, slots.longest(BLOCKS, 41)) == (1, 32)


def test_a_request_reads_a_snapshot_once_and_then_its_own_slot() -> None:
    slots = slots_of()
    first = lease_of(slots, 41)
    assert first.source is None
    compute(first, 0, 41)
    assert first.source == first.slot
    second = lease_of(slots, 41, 41)
    assert second.source == slots.table[9]
    compute(second, 40, 41)
    assert second.source == second.slot
