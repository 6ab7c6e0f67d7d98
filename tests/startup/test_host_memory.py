import ctypes
import subprocess
import sys

import pytest

from radixkv.startup import host_memory
from tests.patience import PATIENCE_S

_PROGRAM = """
import resource, sys, torch
from radixkv.startup.host_memory import keep_freed_memory
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


def faults(what: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, what]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert faults("kept") < 100
    assert faults("given back") > 5_000, "otherwise this test could not fail"


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: object())
    assert not host_memory.keep_freed_memory()
