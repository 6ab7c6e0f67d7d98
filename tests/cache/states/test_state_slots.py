from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache.states.state_slots import StateSlots
from radixkv.errors import InvariantViolation

BLOCKS = np.arange(10, 18, dtype=np.int32)  # of a prompt, four tokens each
NONE_FREE = np.empty(0, dtype=np.int32)


def slots_of(num_snapshots: int = 4, num_requests: int = 2) -> StateSlots:
    return StateSlots(32, 4, num_requests, num_snapshots, every_tokens=8)


def publish(slots: StateSlots, *ends: int, saved_tokens: int = 8) -> None:
    """Publish snapshots at some positions of the prompt."""
    for end in ends:
        slot = slots.take(saved_tokens)
        assert slot is not None
        assert slots.publish(slot, int(BLOCKS[end // 4 - 1]), saved_tokens)


def test_a_hit_ends_at_the_last_snapshot() -> None:
    slots = slots_of()
    assert slots.longest(BLOCKS, 31) == 0
    publish(slots, 8, 20)
    assert [slots.longest(BLOCKS, tokens) for tokens in (31, 20, 19, 8, 7, 0)] == [20, 20, 8, 8, 0, 0]


def test_distances_are_whole_blocks() -> None:
    assert [StateSlots(8, 16, 1, 1, every_tokens).every_tokens for every_tokens in (1, 16, 31, 512)] == [
        16,
        16,
        16,
        512,
    ]


def test_a_block_keeps_its_first_snapshot() -> None:
    slots = slots_of()
    publish(slots, 8)
    before = slots.table.copy()
    slot = slots.take(8)
    assert slot is not None
    assert not slots.publish(slot, int(BLOCKS[1]), 8)
    assert np.array_equal(slots.table, before)
    slots.check(NONE_FREE)


def test_a_freed_block_gives_its_snapshot_back() -> None:
    slots = slots_of()
    publish(slots, 8, 20)
    slots.freed(BLOCKS[3:])
    assert (slots.longest(BLOCKS, 31), slots.num_kept, slots.num_given_up) == (8, 1, 0)
    slots.check(BLOCKS[3:])


def test_the_snapshot_that_is_worth_least_is_given_up() -> None:
    slots = slots_of(num_snapshots=2)
    publish(slots, 8, saved_tokens=100)
    publish(slots, 20, saved_tokens=8)
    publish(slots, 28, saved_tokens=16)
    assert [slots.longest(BLOCKS, tokens) for tokens in (31, 27)] == [28, 8]
    assert slots.num_given_up == 1
    assert slots.take(1) is None, "all others are worth more"
    slots.check(NONE_FREE)


def test_a_snapshot_that_somebody_reads_is_not_given_up() -> None:
    slots = slots_of(num_snapshots=1)
    publish(slots, 8)
    lease = slots.open(BLOCKS, 8, 31, 31)
    assert slots.take(1000) is None
    lease.advance(12)
    taken = slots.take(1000)
    assert taken is not None
    slots.drop(taken)
    lease.close()
    slots.check(NONE_FREE)


def test_a_slot_whose_block_is_freed_is_kept_for_those_that_read_it() -> None:
    slots = slots_of(num_snapshots=1)
    publish(slots, 8)
    first, second = (slots.open(BLOCKS, 8, 31, 31) for _ in range(2))
    source = first.source
    slots.freed(BLOCKS)
    slots.check(BLOCKS)
    first.advance(12)
    assert slots.take(1000) is None
    assert second.source == source
    slots.check(BLOCKS)
    second.close()
    assert slots.take(1000) is not None
    first.close()


def test_no_more_requests_run_than_there_are_slots_for() -> None:
    slots = slots_of(num_requests=1)
    lease = slots.open(BLOCKS, 0, 31, 0)
    with pytest.raises(InvariantViolation, match="more requests run than there are slots for"):
        slots.open(BLOCKS, 0, 31, 0)
    lease.close()
    slots.open(BLOCKS, 0, 31, 0)


def test_a_request_can_only_go_on_where_a_snapshot_is() -> None:
    with pytest.raises(InvariantViolation, match="a request goes on where no snapshot is"):
        slots_of().open(BLOCKS, 8, 31, 31)


def test_tokens_that_are_cached_and_computed_again_are_counted() -> None:
    slots = slots_of()
    publish(slots, 8)
    slots.open(BLOCKS, 8, 31, 23)
    assert slots.num_recomputed_tokens == 12, "20 tokens are whole blocks"


def test_a_used_snapshot_is_not_retracted() -> None:
    slots = slots_of()
    publish(slots, 8, 20)
    unused, used = (int(slots.table[block]) for block in BLOCKS[[1, 4]])
    slots.open(BLOCKS, 20, 31, 31)
    slots.retract(used, int(BLOCKS[4]))
    slots.retract(unused, int(BLOCKS[1]))
    slots.retract(unused, int(BLOCKS[1]))
    assert [slots.longest(BLOCKS, tokens) for tokens in (31, 19)] == [20, 0]
    slots.check(NONE_FREE)


@pytest.mark.parametrize("harm", ["lost", "free block", "pending"])
def test_the_check_sees_what_does_not_add_up(harm: str) -> None:
    slots = slots_of()
    publish(slots, 8)
    if harm == "lost":
        slots._free.pop()
    elif harm == "pending":
        slots._num_pending += 1
    with pytest.raises(InvariantViolation, match=r"^states: "):
        slots.check(BLOCKS if harm == "free block" else NONE_FREE)
