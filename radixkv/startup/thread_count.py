"""Chooses how many threads compute on the CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from radixkv.startup.cgroups import CgroupFolder, cgroup_folders

_SYSTEM = Path("/")


@dataclass(frozen=True, slots=True)
class ThreadCount:
    """A number of threads, and the reason for it.

    Attributes:
        count: at least 1.
        reason: why, for the log.
    """

    count: int
    reason: str


def choose_thread_count(
    configured: int | None,
    environment: Mapping[str, str] = os.environ,
    cpus: Set[int] | None = None,
    system: Path = _SYSTEM,
) -> ThreadCount:
    """Choose the number of threads that compute on the CPU.

    The configuration takes precedence, then the environment variable `OMP_NUM_THREADS`. Otherwise there is one thread
    per physical core in the CPU affinity of the process, but no more than the CPU quotas of its cgroup and of the
    cgroups above allow, rounded down: a process that exceeds its quota is suspended for the rest of each period, in the
    middle of a step.

    Args:
        configured: `model.threads`; None if it is not set.
        environment: the environment variables of the process.
        cpus: numbers of the CPUs that the process may run on; None to query the operating system.
        system: root of the file system with `/proc` and `/sys`.
    """
    if configured is not None:
        return ThreadCount(configured, "set by model.threads")
    omp_threads = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if omp_threads.isdecimal() and int(omp_threads) > 0:
        return ThreadCount(int(omp_threads), "set by OMP_NUM_THREADS")
    if cpus is None:
        cpus = available_cpus()
    num_cores = _num_cores(cpus, system)
    quota = _smallest_quota(system)
    cores = f"{num_cores} {'core' if num_cores == 1 else 'cores'} in the CPU affinity"
    if quota is not None and quota < num_cores:
        return ThreadCount(max(1, math.floor(quota)), f"a CPU quota of {quota:g} and {cores}")
    return ThreadCount(num_cores, f"{cores}, and no smaller CPU quota")


def available_cpus() -> Set[int]:
    """Return the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))  # macOS


def _num_cores(cpus: Set[int], system: Path) -> int:
    """Count physical cores. A second hardware thread shares the FMA units and gains little."""
    cores = set()
    for cpu in cpus:
        siblings = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def _smallest_quota(system: Path) -> float | None:
    """Return the smallest CPU quota of the process's cgroups and of those above, in CPUs; None if there is none."""
    quotas = [_read_quota(folder) for folder in cgroup_folders("cpu", system)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_quota(folder: CgroupFolder) -> float | None:
    """Return the CPU quota of one cgroup in CPUs; None if there is none, or it can't be read."""
    try:
        if folder.is_version_2:
            quota, period = (folder.path / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder.path / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder.path / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
