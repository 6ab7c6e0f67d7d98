"""All engines get the same requests for a row, and one unit of it is counted."""

from __future__ import annotations

import pytest

from bench.parts.peers.rows import build_rows
from bench.parts.peers.worker_process import PeerMeasurement
from bench.parts.peers.workers.task import Done, Task

ROWS = build_rows()
WITH_PROMPTS = [name for name, row in ROWS.items() if row.unit != "start"]


def answer(task: Task) -> PeerMeasurement:
    tokens = [[prompt[-1]] * task.new_tokens for prompt in task.prompts]
    return PeerMeasurement(
        Done(6.0 + task.new_tokens, [2.0] * len(tokens), tokens, [8] * len(tokens)), task.new_tokens * 3.0
    )


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_a_seed_always_makes_the_same_prompts(name: str) -> None:
    row = ROWS[name]
    [task] = row.tasks("a")[-1:]
    assert row.tasks("a")[-1] == task
    assert row.tasks("b")[-1].prompts != task.prompts
    assert len(task.prompts) == row.num_prompts
    low, high = (300, 31_999) if row.model == "llama" else (0, 250)
    assert all(low <= token < high for prompt in task.prompts for token in prompt)
    assert {len(prompt) for prompt in task.prompts} == {row.shared_tokens + row.own_tokens}


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_prompts_share_exactly_what_fills_the_cache(name: str) -> None:
    row, filling = ROWS[name], ROWS[name].filling_task()
    prompts = [prompt for seed in "ab" for task in row.tasks(seed) for prompt in task.prompts]
    assert len({tuple(prompt[: row.shared_tokens]) for prompt in prompts}) == 1
    assert len({tuple(prompt[row.shared_tokens : row.shared_tokens + 8]) for prompt in prompts}) == len(prompts)
    if row.shared_tokens:
        assert filling is not None
        assert filling.fills_cache
        assert filling.prompts[0][: row.shared_tokens] == prompts[0][: row.shared_tokens]
    else:
        assert filling is None


def test_a_request_and_a_call_are_shares_of_all() -> None:
    sample = ROWS["warm"].measure(answer, "a")
    assert (sample.wall_s, sample.cpu_s, sample.cached_tokens) == (7 / 4, 3 / 4, 32)
    assert len(sample.first_tokens) == 4
    assert ROWS["demo-4"].measure(answer, "a").wall_s == 7 / 120


def test_a_token_is_without_the_prompt() -> None:
    """65 tokens: the first one's wall time is reported by the worker, its CPU time by a request with one token."""
    sample = ROWS["decode"].measure(answer, "a")
    assert sample.wall_s == (6 + 65 - 2) / 64
    assert sample.cpu_s == (65 - 1) * 3 / 64
    assert len(sample.first_tokens) == 2
