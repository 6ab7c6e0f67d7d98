"""A worker processes tasks, its failures are reported, and it leaves no process behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.parts.peers.process_tree import read_processes
from bench.parts.peers.worker_process import WorkerFailed, WorkerProcess
from bench.parts.peers.workers.task import Task
from tests.bench.parts.peers.fake_processes import make_fake_worker
from tests.patience import wait_until

pytestmark = pytest.mark.long


def test_tasks_are_answered_one_after_the_other() -> None:
    with make_fake_worker(threads=3) as worker:
        ready = worker.wait_until_ready()
        assert ready.notes == ["float32, OMP_NUM_THREADS=3"]
        assert set(ready.versions) == {"numpy"}
        first = worker.run(Task([[1, 2], [50, 50]], 2, at_once=2))
        assert first.done.token_ids == [[3, 6], [3, 6]]
        assert first.done.cached_tokens == [1, 1]
        assert first.cpu_s >= 0
        assert worker.run(Task([[4]], 1)).done.token_ids == [[4]]
        assert worker.is_running
    assert not worker.is_running


def test_a_task_that_fails_leaves_the_worker_running() -> None:
    with make_fake_worker("openvino", "fails") as worker:
        worker.wait_until_ready()
        with pytest.raises(WorkerFailed, match="openvino: ValueError: odd prompt"):
            worker.run(Task([[1]], 1))
        assert worker.run(Task([[2]], 1)).done.token_ids == [[2]]


def test_the_stderr_of_a_worker_that_dies_is_reported() -> None:
    with make_fake_worker(mode="dies") as worker:
        worker.wait_until_ready()
        with pytest.raises(WorkerFailed, match=r"(?s)ended with exit status 7; .*out of memory"):
            worker.run(Task([[1]], 1))
        assert not worker.is_running
        with pytest.raises(WorkerFailed, match="exit status 7"):
            worker.run(Task([[1]], 1))


def test_a_wrong_number_of_tokens_is_refused() -> None:
    with make_fake_worker(mode="many") as worker:
        worker.wait_until_ready()
        with pytest.raises(WorkerFailed, match="the number of tokens of a prompt is not 2"):
            worker.run(Task([[1]], 2))


def test_a_worker_that_prints_nothing_is_killed() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    with WorkerProcess("x", command, dict(os.environ), timeout_s=0.1) as worker:
        with pytest.raises(WorkerFailed, match=r"x: expected a line within 0.1 s, got none"):
            worker.wait_until_ready()
        assert not worker.is_running


def test_processes_that_a_worker_started_in_a_session_of_their_own_end_too(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with make_fake_worker(mode=f"child {file}") as worker:
        worker.wait_until_ready()
        pid = int(file.read_text(encoding="utf-8"))
        assert pid in read_processes()
    wait_until(lambda: pid not in read_processes())
