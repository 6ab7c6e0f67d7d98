"""The number of threads follows the configuration, the environment, the cores, and the CPU quota, in this order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from radixkv.startup.thread_count import available_cpus, choose_thread_count


def write_machine(root: Path, siblings: dict[int, str], cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    """Write files of /proc and /sys that describe a machine: hardware threads per core by CPU, and cgroups."""
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


FOUR_CORES = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}


def thread_count(system: Path, cpus: set[int], **environment: str) -> int:
    return choose_thread_count(None, environment, cpus, system).count


def test_the_configuration_takes_precedence(tmp_path: Path) -> None:
    chosen = choose_thread_count(3, {"OMP_NUM_THREADS": "2"}, {0, 1}, tmp_path)
    assert (chosen.count, chosen.reason) == (3, "set by model.threads")


@pytest.mark.parametrize(("text", "expected"), [("2", 2), ("2,1", 2), (" 3 ", 3), ("", 4), ("0", 4), ("many", 4)])
def test_the_environment_comes_second(tmp_path: Path, text: str, expected: int) -> None:
    assert thread_count(write_machine(tmp_path, FOUR_CORES), set(range(8)), OMP_NUM_THREADS=text) == expected


def test_two_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    system = write_machine(tmp_path, FOUR_CORES)
    assert thread_count(system, set(range(8))) == 4
    assert thread_count(system, {0, 1, 4, 5}) == 2
    assert thread_count(system, {0, 5}) == 2


def test_without_a_description_of_cores_each_cpu_counts(tmp_path: Path) -> None:
    assert thread_count(tmp_path, {0, 1, 2}) == 3


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "900000 100000\n"}, 4),
        ("0::/a.slice/b\n", {"a.slice/b/cpu.max": "max 100000\n", "a.slice/cpu.max": "300000 100000\n"}, 3),
        ("0::/not/mounted/here\n", {"cpu.max": "200000 100000\n"}, 2),
        (
            "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n",
            {
                "cpu,cpuacct/docker/x/cpu.cfs_quota_us": "200000\n",
                "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 4),
        ("nonsense\n", {}, 4),
    ],
)
def test_a_cpu_quota_bounds_the_threads(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert thread_count(write_machine(tmp_path, FOUR_CORES, cgroup, files), set(range(8))) == expected


def test_the_reason_names_quota_and_cores(tmp_path: Path) -> None:
    system = write_machine(tmp_path, FOUR_CORES, "0::/\n", {"cpu.max": "150000 100000\n"})
    chosen = choose_thread_count(None, {}, set(range(8)), system)
    assert (chosen.count, chosen.reason) == (1, "a CPU quota of 1.5 and 4 cores in the CPU affinity")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_the_affinity_of_this_process_is_seen() -> None:
    cpus_before = os.sched_getaffinity(0)
    one_cpu = {min(cpus_before)}
    os.sched_setaffinity(0, one_cpu)
    try:
        assert available_cpus() == one_cpu
        assert choose_thread_count(None, {}).count == 1
    finally:
        os.sched_setaffinity(0, cpus_before)
