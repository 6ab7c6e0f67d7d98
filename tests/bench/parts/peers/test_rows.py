"""All engines get the same requests for a row, and the result is per request, call or token."""

from __future__ import annotations

import pytest

from bench.parts.peers.rows import build_rows
from bench.parts.peers.worker_process import PeerMeasurement
from bench.parts.peers.workers.task import Done, Task

ROWS = build_rows()
WITH_PROMPTS = [name for name, row in ROWS.items() if row.unit != "start"]


def run_task(task: Task) -> PeerMeasurement:
    """Imitate a worker: 2 s to each first token, 6 s and 1 s per token for a task, and 3 CPU seconds per token."""
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
def test_prompts_share_exactly_the_prefix_that_fills_the_cache(name: str) -> None:
    row = ROWS[name]
    filling_task = row.filling_task()
    prompts = [prompt for seed in "ab" for task in row.tasks(seed) for prompt in task.prompts]
    assert len({tuple(prompt[: row.shared_tokens]) for prompt in prompts}) == 1
    assert len({tuple(prompt[row.shared_tokens : row.shared_tokens + 8]) for prompt in prompts}) == len(prompts)
    if row.shared_tokens:
        assert filling_task is not None
        assert filling_task.fills_cache
        assert filling_task.prompts[0][: row.shared_tokens] == prompts[0][: row.shared_tokens]
    else:
        assert filling_task is None


def test_the_time_of_a_request_or_call_is_the_time_of_the_task_divided_by_their_number() -> None:
    sample = ROWS["warm"].measure(run_task, "a")
    assert (sample.wall_s, sample.cpu_s, sample.cached_tokens) == (7 / 4, 3 / 4, 32)
    assert len(sample.first_tokens) == 4
    assert ROWS["demo-4"].measure(run_task, "a").wall_s == 7 / 120


def test_the_time_of_a_token_is_without_that_of_the_prompt() -> None:
    """Of 65 tokens, the first one is subtracted.

    The worker reports its wall time; its CPU time is that of a second task with one new token.
    """
    sample = ROWS["decode"].measure(run_task, "a")
    assert sample.wall_s == (6 + 65 - 2) / 64
    assert sample.cpu_s == (65 - 1) * 3 / 64
    assert len(sample.first_tokens) == 2
