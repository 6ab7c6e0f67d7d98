"""A worker without a model: each token is the sum of the prompt so far, modulo 97. A mode makes the worker misbehave.

python -m tests.bench.parts.peers.fake_worker --model . --dtype float32 --threads 1 --cache . --mode MODE
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.parts.peers.workers.loop import WorkerAnswer, WorkerOptions, run_in_threads, work
from bench.parts.peers.workers.task import Done, Task


class Sums:
    """Answers with sums.

    Modes: `dies` at the first task, `fails` at prompts with an odd sum, `differs` in its tokens, `many` (returns a
    token too many), `late` (dies at the start), and `child PATH` (starts a process, and writes its id into a file).
    """

    packages = ("numpy",)

    def __init__(self, options: WorkerOptions) -> None:
        self._mode = options.mode
        self.notes = [f"{options.dtype}, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"]
        if self._mode == "late":
            sys.exit("no such model")
        if self._mode.startswith("child"):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            Path(self._mode.split()[1]).write_text(str(child.pid), encoding="utf-8")
        os.system("echo printed by C")
        print("printed by Python")

    def run(self, task: Task) -> Done:
        if self._mode == "dies":
            sys.stderr.write("out of memory\n")
            sys.stderr.flush()
            os._exit(7)
        return run_in_threads(task, lambda prompt: self._answer(prompt, task.new_tokens))

    def _answer(self, prompt: list[int], new_tokens: int) -> WorkerAnswer:
        if self._mode == "fails" and sum(prompt) % 2:
            raise ValueError("odd prompt")
        token_ids: list[int] = []
        for _ in range(new_tokens + (self._mode == "many")):
            token_ids.append((sum(prompt) + sum(token_ids) + (self._mode == "differs")) % 97)
        return WorkerAnswer(0.25, token_ids, len(prompt) - 1)

    def close(self) -> None:
        """Do nothing."""


if __name__ == "__main__":
    work(Sums)
