import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixkv.startup import openmp_threads
from tests.patience import PATIENCE_S

needs_openmp = pytest.mark.skipif(
    not [*(Path(torch.__file__).parent / "lib").glob("libgomp*")],
    reason="needs the OpenMP of PyTorch's wheels for Linux",
)

_PROGRAM = """
import os, torch
from radixkv.startup.openmp_threads import end_openmp_threads

def computed_with():
    torch.ones(1 << 20).add_(1)
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = len(os.listdir("/proc/self/task"))
assert computed_with() == before + 2
assert end_openmp_threads()
assert len(os.listdir("/proc/self/task")) == before
assert computed_with() == before + 2  # they start again
"""

_ENGINE = """
from pathlib import Path
import torch
from radixkv.config import Config, ModelConfig
from radixkv.startup.build_engine import build_engine

def other_threads():  # than those of our own kernels, which all threads of the process share
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return len([name for name in names if name != "radixkv-compute\\n"])

torch.set_num_threads(3)
before = other_threads()
build_engine(Config(model=ModelConfig(path="tiny", threads=3)))
assert other_threads() == before, "threads that loaded the model are left"
"""

_ADAPTER = """
import os
from concurrent.futures import ThreadPoolExecutor
import torch
from radixkv.startup import adapters

torch.set_num_threads(3)
adapters.read_adapter = lambda *_: torch.ones(1 << 20).add_(1)  # as a large adapter does
before = len(os.listdir("/proc/self/task"))
with ThreadPoolExecutor(1) as reader:
    reader.submit(adapters._read, "", None, 0).result()
    assert len(os.listdir("/proc/self/task")) == before + 1, "threads that read the adapter are left"
"""


def run(program: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE_S)


@needs_openmp
def test_threads_end_and_start_again() -> None:
    run(_PROGRAM)


@needs_openmp
def test_a_loaded_model_leaves_no_threads() -> None:
    run(_ENGINE)


@needs_openmp
def test_reading_an_adapter_leaves_no_threads() -> None:
    run(_ADAPTER)


def test_without_that_library_no_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp_threads.importlib.util, "find_spec", lambda _: None)
    assert not openmp_threads.end_openmp_threads()


@pytest.mark.parametrize(("vendor", "count"), [("GenuineIntel", "1500"), ("AuthenticAMD", "5000")])
def test_the_spin_time_is_bounded_on_any_processor(tmp_path: Path, vendor: str, count: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"vendor_id\t: {vendor}\n")
    environment = {"PATH": "/bin"}
    openmp_threads.bound_spinning(environment, cpuinfo)
    assert environment == {"PATH": "/bin", "GOMP_SPINCOUNT": count}


@pytest.mark.parametrize("setting", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_a_setting_of_the_user_takes_precedence(setting: dict[str, str]) -> None:
    environment = dict(setting)
    openmp_threads.bound_spinning(environment)
    assert environment == setting
