from __future__ import annotations

import pytest

from bench.fleet.decision import ConversationPrompts, ReplicaBlocks, time_decisions


def test_conversations_share_their_system_prompt_and_continue() -> None:
    conversations = ConversationPrompts(2048, 0)
    first, second = conversations.prompt(0), conversations.prompt(1)
    assert len(first) == 8192, "bytes of 2,048 tokens"
    assert first[:4096] == second[:4096]
    assert first[4096:] != second[4096:]
    assert conversations.prompt(0, 1)[:8192] == first
    assert conversations.prompt(0) == first


@pytest.mark.parametrize("block_size", [16, 64])
def test_the_decisions_for_a_small_fleet_are_timed(block_size: int) -> None:
    times = time_decisions(replicas=4, num_blocks=2000, block_size=block_size, prompt_tokens=2048, decisions=50)
    assert (times.replicas, times.decisions, times.prompt_tokens) == (4, 50, 2560)
    assert 1000 < times.known_blocks < 3000
    assert 0 < times.p50_us <= times.p99_us <= times.max_us
    assert times.event_us > 0


@pytest.mark.parametrize("block_size", [16, 64])
def test_stored_blocks_replace_removed_ones(block_size: int) -> None:
    times = time_decisions(replicas=4, num_blocks=2000, block_size=block_size, prompt_tokens=2048, decisions=200)
    assert 0.95 * times.known_blocks <= times.end_blocks <= times.known_blocks
    assert times.refused_blocks == 0


def test_the_least_recently_used_conversation_is_evicted_first_from_its_end() -> None:
    replica = ReplicaBlocks()
    assert replica.hold(1, [10, 11, 12]) == [10, 11, 12]
    assert replica.hold(2, [20, 21]) == [20, 21]
    assert replica.hold(1, [10, 11, 12, 13]) == [13]
    assert replica.hold(3, [30]) == [30]
    assert replica.evict(1) == [21]
    assert replica.evict(3) == [20, 13, 12]
    assert replica.conversations == [1, 3]
    assert replica.hold(1, [10, 11, 12]) == [12]


def test_the_most_recently_used_conversation_is_not_evicted() -> None:
    replica = ReplicaBlocks()
    replica.hold(1, [10])
    replica.hold(2, [20, 21])
    assert replica.evict(5) == [10]
    assert replica.conversations == [2]
