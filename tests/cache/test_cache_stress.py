"""Random walks over the cache, checked by the oracle in every step: about 73,000 steps. `make stress` makes more."""

from __future__ import annotations

from collections import Counter

import pytest

from radixkv.config import EVICTION_POLICIES
from tests.cache.walk.cache_walk import (
    DEEP,
    HINTED,
    PUBLIC,
    ROOMY,
    TIGHT,
    WITH_PARTS,
    WITH_QUOTAS,
    WITH_SHARED_MEMORY,
    World,
    dice_of,
    failure_of,
    shortest_failing,
    walk,
)

# A walk of 4,000 steps contains every event that is asserted here. Mutants are also tested with the longer walk.
NUM_STEPS = [4000, pytest.param(10_000, marks=pytest.mark.slow)]


def world_id(world: World) -> str:
    return f"block_size={world.block_size},blocks={world.num_blocks}"


@pytest.mark.parametrize("world", ROOMY, ids=world_id)
def test_a_cache_with_room_reuses_everything_ever_published(world: World) -> None:
    events = Counter[str]()
    for seed in range(10):
        events += walk(world, "lru", dice_of(seed, steps=100))
    assert events["OutOfBlocks"] == events["evicted blocks"] == 0
    assert events["splits"] > 0
    assert events["leaves attached"] > 0
    assert events["leaves grown"] > 0
    assert events["blocks adopted"] > 0
    assert (events["copies"] > 0) == (world.block_size > 1)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("world", TIGHT, ids=world_id)
def test_a_cache_without_room_reuses_everything_not_evicted(world: World, num_steps: int) -> None:
    events = walk(world, "lru", dice_of(world.block_size, num_steps))
    wanted_in_some_worlds = (
        {"copies", "extensions in a copy", "tail blocks replaced", "shared blocks not reused"}
        if world.block_size > 1
        else set()
    )
    wanted_in_some_worlds |= {"refused tokens"} if world.max_retained_blocks < world.num_blocks else set()
    wanted_in_some_worlds |= {"explained as EXPIRED"} if world.max_retained_blocks else set()
    wanted_in_all_worlds = {
        "splits",
        "leaves attached",
        "leaves grown",
        "leaves truncated",
        "blocks adopted",
        "closed uncommitted",
        "evicted blocks",
        "blocks expired",
        "explained as EVICTED",
        "OutOfBlocks",
        "retained tokens",
        "blocks purged",
        "blocks purged while in use",
        "commits after a purge",
        "extensions",
        "extensions refused",
        "adapters drained",
    }
    wanted = wanted_in_all_worlds | wanted_in_some_worlds
    assert {event for event in wanted if not events[event]} == set()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("world", WITH_QUOTAS, ids=world_id)
def test_tenants_get_their_quotas_and_correct_miss_reasons(world: World, num_steps: int) -> None:
    events = walk(world, "lru", dice_of(1, num_steps))
    wanted = {"evicted blocks", "OutOfBlocks", "retained tokens", "refused tokens", "blocks purged while in use"}
    wanted |= {"explained as ADAPTER_CHANGED"} if world.num_namespaces > 2 else set()
    wanted |= {"QuotaExceeded"} if any(quota.ceiling_blocks for _, quota in world.quotas) else set()
    assert {event for event in wanted if not events[event]} == set()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_steps", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", HINTED, ids=world_id)
def test_hints_of_one_tenant_change_nothing_for_others(world: World, num_steps: int) -> None:
    events = walk(world, "lru", dice_of(6, num_steps))
    wanted = {"dropped", "dropped of sessions", "dropped of namespaces", "shared", "shared of sessions"}
    wanted |= {"nodes of ended sessions", "evicted blocks"}
    wanted |= {"retained of namespaces"} if world.max_retained_blocks and not world.public_texts else set()
    assert {event for event in wanted if not events[event]} == set()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_steps", [2500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", WITH_PARTS, ids=world_id)
def test_matches_have_the_parts_that_they_need(world: World, num_steps: int) -> None:
    events = walk(world, "lru", dice_of(3, num_steps))
    wanted = {"matches cut short", "evicted blocks", "blocks adopted", "blocks purged while in use", "extensions"}
    wanted |= {"copies", "extensions in a copy"} if world.block_size > 1 else set()
    assert {event for event in wanted if not events[event]} == set()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_steps", [2500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", WITH_SHARED_MEMORY, ids=world_id)
def test_matches_have_the_parts_that_they_need_if_parts_share_memory_with_blocks(world: World, num_steps: int) -> None:
    events = walk(world, "lru", dice_of(4, num_steps))
    wanted = {"matches cut short", "evicted blocks", "blocks adopted", "blocks purged while in use", "extensions"}
    assert {event for event in wanted if not events[event]} == set()


@pytest.mark.parametrize("world", DEEP, ids=world_id)
def test_a_path_that_is_too_long_loses_branches_and_nothing_else(world: World) -> None:
    events = walk(world, "lru", dice_of(5, steps=4000))
    wanted = {"blocks thinned", "long paths closed after a purge", "blocks purged while in use", "leases held"}
    assert {event for event in wanted if not events[event]} == set()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_steps", [1500, pytest.param(8000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", PUBLIC, ids=world_id)
def test_a_prompt_is_leased_wherever_there_is_room(world: World, num_steps: int) -> None:
    events = walk(world, "lru", dice_of(4, num_steps))
    wanted = {"texts made public", "texts no longer public", "public tokens", "evicted blocks", "OutOfBlocks"}
    wanted |= {"refused although nothing runs"} if world.num_blocks < 20 else set()
    wanted |= {"leased where there is room"} if world.num_blocks in (10, 12) else set()
    assert {event for event in wanted if not events[event]} == set()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_policy_frees_the_right_blocks(policy: str) -> None:
    events = Counter[str]()
    for world in (*TIGHT, *WITH_QUOTAS):
        events += walk(world, policy, dice_of(2, steps=400))
    assert min(events["evicted blocks"], events["splits"], events["leaves truncated"]) > 0


def test_a_failing_walk_is_shortened() -> None:
    assert shortest_failing(lambda dice: {3, 17} <= set(dice), list(range(100))) == [3, 17]


def test_a_walk_that_passes_reports_no_failure() -> None:
    assert failure_of(TIGHT[0], "lru", range(50)) == ""
