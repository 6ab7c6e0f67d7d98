"""The thread pool of the C++ kernels computes every item once, from any thread and after a fork."""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from radixkv.kernels.native import gemm
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def in_use(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_library", None)  # restored after the test
    gemm.use(library)


def rows_and_panels() -> tuple[torch.Tensor, gemm.Panels]:
    """Make rows and a weight whose matmul is divided into many items: by tiles of rows, and by panels."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 130, generator=generator)
    return rows, gemm.Panels(torch.randn(300, 130, generator=generator))


def test_callers_on_several_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, panels = rows_and_panels()
    expected = gemm.multiply(rows, panels, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: random.randint(1, 6))

    def is_right(_: int) -> bool:
        return torch.equal(gemm.multiply(rows, panels, None), expected)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(is_right, range(2000)))


def test_more_threads_than_items_and_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, panels = rows_and_panels()
    expected = gemm.multiply(rows, panels, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    for _ in range(50):
        assert torch.equal(gemm.multiply(rows, panels, None), expected)
        assert torch.equal(gemm.multiply(rows[:1], panels, None), expected[:1])


def multiply_again(rows: torch.Tensor, panels: gemm.Panels, expected: torch.Tensor) -> None:
    for _ in range(100):
        assert torch.equal(gemm.multiply(rows, panels, None), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, panels = rows_and_panels()
    expected = gemm.multiply(rows, panels, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(gemm.multiply(rows, panels, None), expected)  # this starts the threads of the pool
    child = multiprocessing.get_context("fork").Process(target=multiply_again, args=(rows, panels, expected))
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    multiply_again(rows, panels, expected)


_PROGRAM_THAT_MULTIPLIES = """
import torch
from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.native import gemm
from radixkv.kernels.native.library import load_library

gemm.use(load_library(cache_directory()))
torch.set_num_threads(3)
rows, panels = torch.ones(40, 130), gemm.Panels(torch.ones(300, 130))
assert (gemm.multiply(rows, panels, None) == 130).all()
"""


@pytest.mark.sampled(one_in=4)
def test_the_process_ends_while_threads_wait() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM_THAT_MULTIPLIES], capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
