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
from radixkv.startup.openmp_threads import end_own_threads

def computed_with():
    torch.ones(1 << 20).add_(1)
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = len(os.listdir("/proc/self/task"))
assert computed_with() == before + 2
assert end_own_threads()
assert len(os.listdir("/proc/self/task")) == before
assert computed_with() == before + 2  # they start again
"""

_ENGINE = """
import os
import torch
from radixkv.config import Config, ModelConfig
from radixkv.startup.build_engine import build_engine

torch.set_num_threads(3)
before = len(os.listdir("/proc/self/task"))
build_engine(Config(model=ModelConfig(path="tiny")))
assert len(os.listdir("/proc/self/task")) == before, "threads that loaded the model are left"
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
def test_an_adapter_that_was_read_leaves_no_threads() -> None:
    run(_ADAPTER)


def test_without_that_library_nothing_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(openmp_threads.torch, "__file__", str(tmp_path / "__init__.py"))
    assert not openmp_threads.end_own_threads()
