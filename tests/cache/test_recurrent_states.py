import random

import numpy as np
import pytest

from radixkv.cache.recurrent_states import SnapshotOrder, StateLease, StateSlots
from radixkv.errors import InvariantViolation


def test_the_snapshot_that_saves_the_fewest_tokens_has_the_lowest_score() -> None:
    order = SnapshotOrder()
    for slot, saved_tokens in ((3, 512), (5, 16), (4, 100)):
        order.add(slot, saved_tokens)
    assert order.lowest() == 5
    order.discard(5)
    assert order.lowest() == 4


def test_a_use_adds_the_saved_tokens_to_the_score() -> None:
    order = SnapshotOrder()
    order.add(1, 100)
    order.add(2, 250)
    order.record_use(1)
    assert order.lowest() == 1
    order.record_use(1)
    assert (order.lowest(), order.num_uses(1)) == (2, 2)


def test_old_scores_lose_their_weight() -> None:
    order = SnapshotOrder()
    order.add(0, 250)
    for slot in (1, 2):
        order.add(slot, 100)
        assert order.lowest() == slot, "the score of each new snapshot is 100 higher than that of the one before"
        order.evict(slot)
    order.add(3, 100)
    assert order.lowest() == 0


def test_the_lowest_score_is_that_of_a_plain_dictionary_after_random_events() -> None:
    rng, order = random.Random(1), SnapshotOrder()
    snapshots: dict[int, tuple[int, int, float]] = {}  # by slot: saved tokens, uses, score
    for slot in range(2000):
        event = rng.random()
        if event < 0.4 or not snapshots:
            saved_tokens = rng.randint(1, 1000)
            snapshots[slot] = (saved_tokens, 0, order.level + saved_tokens)
            order.add(slot, saved_tokens)
        elif event < 0.8:
            used = rng.choice(list(snapshots))
            saved_tokens, num_uses, _ = snapshots[used]
            snapshots[used] = (saved_tokens, num_uses + 1, order.level + saved_tokens * (num_uses + 2))
            order.record_use(used)
        elif event < 0.9:
            discarded = rng.choice(list(snapshots))
            del snapshots[discarded]
            order.discard(discarded)
        else:
            lowest = order.lowest()
            assert lowest is not None
            level = max(order.level, snapshots.pop(lowest)[2])
            order.evict(lowest)
            assert order.level == level
        assert len(order) == len(snapshots)
        lowest = order.lowest()
        assert (lowest is None) == (not snapshots)
        if lowest is not None:
            assert snapshots[lowest][2] == min(score for _, _, score in snapshots.values()) == order.score(lowest)


@pytest.mark.parametrize("is_used", [False, True])
def test_outdated_entries_take_no_more_memory_than_current_ones(is_used: bool) -> None:
    order = SnapshotOrder()
    for slot in range(1000):
        order.add(slot % 7, slot)
        if is_used:
            order.record_use(slot % 7)
        assert len(order._heap) <= 2 * len(order) + 64
        if not is_used:
            order.discard(slot % 7)


BLOCKS = np.arange(16, dtype=np.int32)


def lease_of(slots: StateSlots, num_prompt_tokens: int, found_tokens: int = 0) -> StateLease:
    """Open a lease of a prompt of which `found_tokens` are cached, with or without a snapshot."""
    cached_tokens = slots.num_reusable_tokens(BLOCKS, min(found_tokens, num_prompt_tokens - 1))
    return slots.open(BLOCKS, cached_tokens, num_prompt_tokens, found_tokens)


def slots_for_leases(num_snapshots: int = 16, every_tokens: int = 16) -> StateSlots:
    return StateSlots(BLOCKS.size, 4, 3, num_snapshots, every_tokens)


def compute(
    lease: StateLease, start: int, end: int, num_published_blocks: int | None = None, *, keeps: bool = True
) -> list[int]:
    """Compute the tokens `[start, end)` and publish whole blocks. Returns the positions before `end` of kept states."""
    writes = lease.writes(start, end, keeps=keeps)
    assert writes[-1] == (end, lease.slot)
    assert len({slot for _, slot in writes}) == len(writes)
    lease.advance(end)
    lease.publish(BLOCKS, end // 4 if num_published_blocks is None else num_published_blocks)
    return [position for position, _ in writes[:-1]]


@pytest.mark.parametrize(
    ("num_tokens", "found_tokens", "positions"),
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
def test_a_prompt_saves_states_at_its_end_its_branch_and_at_regular_distances(
    num_tokens: int, found_tokens: int, positions: list[int]
) -> None:
    assert compute(lease_of(slots_for_leases(), num_tokens, found_tokens), 0, num_tokens) == positions


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 7, 18])
def test_a_prompt_computed_in_chunks_keeps_the_same_states(chunk_tokens: int) -> None:
    lease, positions = lease_of(slots_for_leases(), 41, 27), []
    for start in range(0, 41, chunk_tokens):
        positions += compute(lease, start, min(41, start + chunk_tokens))
    assert positions == [16, 24, 32, 40]


def test_a_state_that_another_request_waits_for_is_kept() -> None:
    lease = lease_of(slots_for_leases(), 41)
    assert compute(lease, 0, 10) == []
    assert lease.request_snapshot(12)
    assert compute(lease, 10, 20) == [12, 16]


def test_an_answer_keeps_its_newest_state_alone() -> None:
    slots = slots_for_leases()
    lease = lease_of(slots, 10)
    compute(lease, 0, 10)
    for start in range(10, 30):
        compute(lease, start, start + 1)
    assert np.flatnonzero(slots.table >= 0).tolist() == [1, 6], "after 8 tokens of the prompt, and after 28"
    lease.close()
    slots.check(np.empty(0, dtype=np.int32))


def test_an_answer_that_is_computed_again_with_its_prompt_keeps_only_its_last_state() -> None:
    assert compute(lease_of(slots_for_leases(), 10), 0, 30) == [8, 28]


def test_nothing_is_published_beyond_the_blocks_of_the_tree() -> None:
    slots = slots_for_leases()
    lease = lease_of(slots, 41)
    compute(lease, 0, 41, num_published_blocks=5)
    assert slots.num_reusable_tokens(BLOCKS, 41) == 16
    assert len(lease.pending_slots) == 2
    lease.publish(BLOCKS, 10)
    assert slots.num_reusable_tokens(BLOCKS, 41) == 40


def test_states_of_a_step_that_was_not_computed_are_not_published() -> None:
    slots = slots_for_leases()
    lease = lease_of(slots, 41)
    compute(lease, 0, 20)
    lease.writes(20, 41, keeps=True)  # the step fails, and a shorter one is tried
    lease.publish(BLOCKS, 10)
    assert slots.num_reusable_tokens(BLOCKS, 41) == 16
    assert compute(lease, 20, 35) == [32]
    assert slots.num_reusable_tokens(BLOCKS, 41) == 32
    lease.close()
    lease.close()
    slots.check(np.empty(0, dtype=np.int32))
    assert slots.num_kept == 2


def test_a_request_that_publishes_nothing_takes_no_slots() -> None:
    slots = slots_for_leases(num_snapshots=0)
    assert compute(lease_of(slots, 41), 0, 41, keeps=False) == []


def test_without_room_a_request_keeps_what_it_can() -> None:
    slots = slots_for_leases(num_snapshots=1)
    lease = lease_of(slots, 41)
    assert compute(lease, 0, 20) == [16]
    assert compute(lease, 20, 41) == [32]
    assert (slots.num_evicted, slots.num_reusable_tokens(BLOCKS, 41)) == (1, 32)


def test_a_request_reads_a_snapshot_once_and_then_its_own_slot() -> None:
    slots = slots_for_leases()
    first = lease_of(slots, 41)
    assert first.source is None
    compute(first, 0, 41)
    assert first.source == first.slot
    second = lease_of(slots, 41, 41)
    assert second.source == slots.table[9]
    compute(second, 40, 41)
    assert second.source == second.slot


SLOT_BLOCKS = np.arange(10, 18, dtype=np.int32)  # the blocks of a prompt, of four tokens each
NONE_FREE = np.empty(0, dtype=np.int32)


def slots_of(num_snapshots: int = 4, num_requests: int = 2) -> StateSlots:
    return StateSlots(32, 4, num_requests, num_snapshots, every_tokens=8)


def publish(slots: StateSlots, *ends: int, saved_tokens: int = 8) -> None:
    """Publish snapshots at some positions of the prompt."""
    for end in ends:
        slot = slots.take(saved_tokens)
        assert slot is not None
        assert slots.publish(slot, int(SLOT_BLOCKS[end // 4 - 1]), saved_tokens)


def test_a_hit_ends_at_the_last_snapshot() -> None:
    slots = slots_of()
    assert slots.num_reusable_tokens(SLOT_BLOCKS, 31) == 0
    publish(slots, 8, 20)
    assert [slots.num_reusable_tokens(SLOT_BLOCKS, tokens) for tokens in (31, 20, 19, 8, 7, 0)] == [20, 20, 8, 8, 0, 0]


def test_the_distance_between_snapshots_is_rounded_down_to_whole_blocks() -> None:
    for requested_tokens, every_tokens in ((1, 16), (16, 16), (31, 16), (512, 512)):
        assert StateSlots(8, 16, 1, 1, requested_tokens).every_tokens == every_tokens


def test_a_block_keeps_its_first_snapshot() -> None:
    slots = slots_of()
    publish(slots, 8)
    before = slots.table.copy()
    slot = slots.take(8)
    assert slot is not None
    assert not slots.publish(slot, int(SLOT_BLOCKS[1]), 8)
    assert np.array_equal(slots.table, before)
    slots.check(NONE_FREE)


def test_the_snapshot_of_a_freed_block_is_freed() -> None:
    slots = slots_of()
    publish(slots, 8, 20)
    slots.free_snapshots(SLOT_BLOCKS[3:])
    assert (slots.num_reusable_tokens(SLOT_BLOCKS, 31), slots.num_kept, slots.num_evicted) == (8, 1, 0)
    slots.check(SLOT_BLOCKS[3:])


def test_the_snapshot_with_the_lowest_score_is_evicted() -> None:
    slots = slots_of(num_snapshots=2)
    publish(slots, 8, saved_tokens=100)
    publish(slots, 20, saved_tokens=8)
    publish(slots, 28, saved_tokens=16)
    assert [slots.num_reusable_tokens(SLOT_BLOCKS, tokens) for tokens in (31, 27)] == [28, 8]
    assert slots.num_evicted == 1
    assert slots.take(1) is None, "the scores of all others are higher"
    slots.check(NONE_FREE)


def test_a_snapshot_that_a_request_reads_is_not_evicted() -> None:
    slots = slots_of(num_snapshots=1)
    publish(slots, 8)
    lease = slots.open(SLOT_BLOCKS, 8, 31, 31)
    assert slots.take(1000) is None
    lease.advance(12)
    slot = slots.take(1000)
    assert slot is not None
    slots.drop(slot)
    lease.close()
    slots.check(NONE_FREE)


def test_the_snapshot_of_a_freed_block_is_kept_until_all_requests_have_read_it() -> None:
    slots = slots_of(num_snapshots=1)
    publish(slots, 8)
    first, second = (slots.open(SLOT_BLOCKS, 8, 31, 31) for _ in range(2))
    source = first.source
    slots.free_snapshots(SLOT_BLOCKS)
    slots.check(SLOT_BLOCKS)
    first.advance(12)
    assert slots.take(1000) is None
    assert second.source == source
    slots.check(SLOT_BLOCKS)
    second.close()
    assert slots.take(1000) is not None
    first.close()


def test_no_more_requests_run_than_there_are_slots_for() -> None:
    slots = slots_of(num_requests=1)
    lease = slots.open(SLOT_BLOCKS, 0, 31, 0)
    with pytest.raises(InvariantViolation, match="more requests run than there are slots for"):
        slots.open(SLOT_BLOCKS, 0, 31, 0)
    lease.close()
    slots.open(SLOT_BLOCKS, 0, 31, 0)


def test_a_request_can_only_continue_from_a_snapshot() -> None:
    with pytest.raises(InvariantViolation, match="a request continues where there is no snapshot"):
        slots_of().open(SLOT_BLOCKS, 8, 31, 31)


def test_tokens_that_are_cached_and_computed_again_are_counted() -> None:
    slots = slots_of()
    publish(slots, 8)
    slots.open(SLOT_BLOCKS, 8, 31, 23)
    assert slots.num_recomputed_tokens == 12, "20 of the 23 found tokens fill whole blocks, and the snapshot is after 8"


def test_a_used_snapshot_is_not_retracted() -> None:
    slots = slots_of()
    publish(slots, 8, 20)
    unused, used = (int(slots.table[block]) for block in SLOT_BLOCKS[[1, 4]])
    slots.open(SLOT_BLOCKS, 20, 31, 31)
    slots.retract(used, int(SLOT_BLOCKS[4]))
    slots.retract(unused, int(SLOT_BLOCKS[1]))
    slots.retract(unused, int(SLOT_BLOCKS[1]))
    assert [slots.num_reusable_tokens(SLOT_BLOCKS, tokens) for tokens in (31, 19)] == [20, 0]
    slots.check(NONE_FREE)


@pytest.mark.parametrize("harm", ["lost", "free block", "pending"])
def test_the_check_detects_inconsistencies(harm: str) -> None:
    slots = slots_of()
    publish(slots, 8)
    if harm == "lost":
        slots._free.pop()
    elif harm == "pending":
        slots._num_pending += 1
    with pytest.raises(InvariantViolation, match=r"^states: "):
        slots.check(SLOT_BLOCKS if harm == "free block" else NONE_FREE)
