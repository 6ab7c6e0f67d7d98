"""The loop of a worker reserves stdout for responses, and continues after exceptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.parts.peers.workers.loop import WorkerAnswer, run_in_threads
from bench.parts.peers.workers.task import Done, Ready, Task, from_line

ROOT = Path(__file__).parents[5]


def test_only_responses_are_on_stdout() -> None:
    command = [sys.executable, "-m", "tests.bench.parts.peers.fake_worker", "--model", ".", "--dtype", "bfloat16"]
    command += ["--threads", "2", "--cache", ".", "--mode", "fails"]
    tasks = Task([[1]], 1).to_line() + Task([[2]], 1).to_line() + json.dumps({"other": 1}) + "\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=tasks, capture_output=True, text=True, env=environment, check=True)
    ready, error_of_odd_prompt, even, error_of_other_json = map(from_line, done.stdout.splitlines())
    assert isinstance(ready, Ready)
    assert ready.notes == ["bfloat16, OMP_NUM_THREADS=2"]
    assert error_of_odd_prompt == "ValueError: odd prompt"
    assert isinstance(even, Done)
    assert str(error_of_other_json).startswith("TypeError")
    assert "printed by C" in done.stderr
    assert "printed by Python" in done.stderr


def test_answers_are_in_the_order_of_prompts() -> None:
    done = run_in_threads(Task([[5], [6], [7]], 1, at_once=3), lambda prompt: WorkerAnswer(0.1, prompt, None))
    assert done.token_ids == [[5], [6], [7]]
    assert done.first_s == [0.1] * 3
    assert done.wall_s > 0
