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

_END_THREADS = """
import os, torch
from radixkv.startup.openmp_threads import end_openmp_threads

def num_threads():
    return len(os.listdir("/proc/self/task"))

def compute_with_three_threads():
    torch.ones(1 << 20).add_(1)

torch.set_num_threads(3)
num_before = num_threads()
compute_with_three_threads()
assert num_threads() == num_before + 2
assert end_openmp_threads()
assert num_threads() == num_before
compute_with_three_threads()
assert num_threads() == num_before + 2, "the threads start again"
"""

_BUILD_ENGINE = """
from pathlib import Path
import torch
from radixkv.config import Config, ModelConfig
from radixkv.startup.build_engine import build_engine

def num_threads():  # without those of the native kernels, which stay
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return len([name for name in names if name != "radixkv-compute\\n"])

torch.set_num_threads(3)
num_before = num_threads()
build_engine(Config(model=ModelConfig(path="tiny", threads=3)))
assert num_threads() == num_before, "threads that loaded the model are left"
"""

_READ_ADAPTER = """
import os
from concurrent.futures import ThreadPoolExecutor
import torch
from radixkv.startup import adapters

torch.set_num_threads(3)
# Reading a large adapter uses threads of OpenMP, as this does.
adapters.read_adapter = lambda *_: torch.ones(1 << 20).add_(1)
num_before = len(os.listdir("/proc/self/task"))
with ThreadPoolExecutor(1) as reader:
    reader.submit(adapters._read, "", None, 0).result()
    assert len(os.listdir("/proc/self/task")) == num_before + 1, "other threads than that of `reader` are left"
"""


def run(program: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE_S)


@needs_openmp
def test_threads_end_and_start_again() -> None:
    run(_END_THREADS)


@needs_openmp
def test_a_loaded_model_leaves_no_threads() -> None:
    run(_BUILD_ENGINE)


@needs_openmp
@pytest.mark.long
def test_reading_an_adapter_leaves_no_threads() -> None:
    run(_READ_ADAPTER)


def test_without_the_openmp_library_of_pytorch_no_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp_threads.importlib.util, "find_spec", lambda _: None)
    assert not openmp_threads.end_openmp_threads()


@pytest.mark.parametrize(("vendor", "spin_count"), [("GenuineIntel", "1500"), ("AuthenticAMD", "5000")])
def test_the_spin_time_is_bounded_on_any_processor(tmp_path: Path, vendor: str, spin_count: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"vendor_id\t: {vendor}\n")
    environment = {"PATH": "/bin"}
    openmp_threads.bound_spinning(environment, cpuinfo)
    assert environment == {"PATH": "/bin", "GOMP_SPINCOUNT": spin_count}


@pytest.mark.parametrize("setting", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_a_setting_of_the_user_takes_precedence(setting: dict[str, str]) -> None:
    environment = dict(setting)
    openmp_threads.bound_spinning(environment)
    assert environment == setting
