from __future__ import annotations

import pytest

from bench.fleet.decision import ConversationPrompts, time_decisions


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
