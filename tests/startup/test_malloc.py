import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.startup import malloc as host_memory
from tests.patience import PATIENCE_S

HUGE_PAGES_OFF = {"THP_MEM_ALLOC_ENABLE": "0"}

# Prints the page faults of tensors for which memory was freed before: with "kept", the allocator keeps freed memory.
_COUNT_PAGE_FAULTS = """
import resource, sys, torch
from radixkv.startup.malloc import keep_freed_memory
assert sys.argv[1] == "given back" or keep_freed_memory()
def allocate_and_free():
    large, small = torch.ones(20_000_000), torch.ones(10_000_000)
    del large, small
for _ in range(12):  # the allocator adapts to the first sizes
    allocate_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

# Prints whether huge pages are requested for the memory of a large tensor: the flag "hg" of its mapping.
_FIND_HUGE_PAGES = """
import sys, torch
from radixkv.startup.malloc import use_huge_pages
if sys.argv[1] == "huge":
    use_huge_pages()
tensor, is_inside = torch.ones(1 << 24), False
address = tensor.data_ptr() + tensor.nbytes // 2
for line in open("/proc/self/smaps", encoding="utf-8"):
    first, *others = line.split()
    if "-" in first and not first.endswith(":"):
        start, end = (int(each, 16) for each in first.split("-"))
        is_inside = start <= address < end
    elif is_inside and first == "VmFlags:":
        print("hg" in others)
"""


def count_page_faults(mode: str) -> int:
    command = [sys.executable, "-c", _COUNT_PAGE_FAULTS, mode]
    return int(run(command, HUGE_PAGES_OFF))


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run a command without `HUGE_PAGES_OFF`, which another test may have set here, and return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name not in HUGE_PAGES_OFF}
    return subprocess.run(
        command,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert count_page_faults("kept") < 100
    assert count_page_faults("given back") > 5_000, "otherwise this test could not fail"


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: object())
    assert not host_memory.keep_freed_memory()


@pytest.mark.sampled(one_in=3)
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux without huge pages")
@pytest.mark.parametrize(
    ("mode", "environment", "is_requested"), [("huge", {}, True), ("huge", HUGE_PAGES_OFF, False), ("", {}, False)]
)
def test_large_tensors_request_huge_pages(mode: str, environment: dict[str, str], *, is_requested: bool) -> None:
    assert run([sys.executable, "-c", _FIND_HUGE_PAGES, mode], environment).split() == [str(is_requested)]
