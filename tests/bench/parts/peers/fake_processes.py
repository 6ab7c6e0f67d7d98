"""Worker processes that run `fake_worker`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.parts.peers.worker_process import WorkerProcess

ROOT = Path(__file__).parents[4]


def make_fake_worker(name: str = "fake", mode: str = "", threads: int = 1) -> WorkerProcess:
    command = [sys.executable, "-m", "tests.bench.parts.peers.fake_worker", "--model", ".", "--dtype", "float32"]
    command += ["--threads", str(threads), "--cache", ".", "--mode", mode]
    return WorkerProcess(name, command, {**os.environ, "PYTHONPATH": str(ROOT)})
