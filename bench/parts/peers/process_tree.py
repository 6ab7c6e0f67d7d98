"""Measures CPU time and memory of a process and its descendants, and kills them. Linux only, since it reads /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def read_processes() -> dict[int, tuple[int, float]]:
    """Return the parent and the CPU seconds of each process, including those of its children that were waited for."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            # After the name: the parent is field 1, and user and system time, own and of children, are fields 11 to 14.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            processes[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_SECOND)
    return processes


def tree_of(pid: int, processes: dict[int, tuple[int, float]]) -> set[int]:
    """Return a running process and all its descendants; empty if it has ended."""
    tree = {pid} & processes.keys()
    while children := {each for each, (parent, _) in processes.items() if parent in tree} - tree:
        tree |= children
    return tree


def descendants(pid: int) -> set[int]:
    """Return all descendants of a running process; empty if it has ended."""
    return tree_of(pid, read_processes()) - {pid}


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants so far, in multiples of the kernel's clock tick."""
    processes = read_processes()
    return sum(processes[each][1] for each in tree_of(pid, processes))


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes, including mapped files. Processes that have ended count as 0."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return total


def kill(pids: Iterable[int]) -> None:
    """Kill the processes that still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
