import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.startup import malloc as host_memory
from tests.patience import PATIENCE_S

OFF = {"THP_MEM_ALLOC_ENABLE": "0"}

_PROGRAM = """
import resource, sys, torch
from radixkv.startup.malloc import keep_freed_memory
assert sys.argv[1] == "given back" or keep_freed_memory()
def use():
    large, small = torch.ones(20_000_000), torch.ones(10_000_000)
    del large, small
for _ in range(12):  # until the allocator has settled
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_PAGES = """
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
        print("hg" in others)  # huge pages are advised
"""


def faults(what: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, what]
    return int(run(command, OFF))


def run(command: list[str], environment: dict[str, str]) -> str:
    """Another test of this process may have set the variable."""
    inherited = {name: value for name, value in os.environ.items() if name not in OFF}
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
    assert faults("kept") < 100
    assert faults("given back") > 5_000, "otherwise this test could not fail"


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: object())
    assert not host_memory.keep_freed_memory()


@pytest.mark.sampled(one_in=3)
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux without huge pages")
@pytest.mark.parametrize(
    ("what", "environment", "expected"), [("huge", {}, True), ("huge", OFF, False), ("", {}, False)]
)
def test_large_tensors_request_huge_pages(what: str, environment: dict[str, str], *, expected: bool) -> None:
    assert run([sys.executable, "-c", _PAGES, what], environment).split() == [str(expected)]
