"""The processes of a tree are found by their parents, and their CPU seconds add up."""

from __future__ import annotations

import os
import subprocess
import sys

from bench.parts.peers.process_tree import cpu_s, kill, read_processes, tree_of
from tests.patience import PATIENCE_S

COMPUTATION = "sum(index * index for index in range(3_000_000))"


def test_descendants_of_all_generations_are_in_the_tree() -> None:
    processes = {  # parent and CPU seconds, by process id
        1: (0, 1.0),
        2: (1, 1.0),
        3: (2, 1.0),
        4: (1, 1.0),
        5: (0, 1.0),
    }
    assert tree_of(1, processes) == {1, 2, 3, 4}
    assert tree_of(2, processes) == {2, 3}
    assert tree_of(9, processes) == set()


def test_this_process_is_found_with_its_parent() -> None:
    assert read_processes()[os.getpid()][0] == os.getppid()


def test_the_cpu_seconds_of_ended_children_count() -> None:
    before_s = cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", f"for _ in range(3): {COMPUTATION}"], check=True)
    assert cpu_s(os.getpid()) > before_s


def test_a_process_may_be_killed_twice() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    kill([process.pid])
    assert process.wait(PATIENCE_S) < 0
    kill([process.pid])
