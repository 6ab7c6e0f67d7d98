"""C++ attention is a candidate if it can be compiled."""

import ctypes
import logging

import pytest
import torch

from radixkv.kernels.native.compiler import NotCompiled
from radixkv.model import on_cpu
from radixkv.model.attention.interface import AttentionKind, AttentionUse
from radixkv.model.on_cpu import cpu_candidates
from radixkv.storage.device_pool import KVShape

NATIVE_AND_TORCH = ["native attention", "torch's attention"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fake_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library of C++ kernels exist, without compiling it."""
    monkeypatch.setattr(on_cpu, "native_library", lambda: ctypes.CDLL(None))
    monkeypatch.setattr(on_cpu, "NativeKernels", lambda library: None)


def candidates(dtype: torch.dtype, kv_dtype: str = "auto") -> list[str]:
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=dtype).stored_as(kv_dtype)
    return [*cpu_candidates(AttentionUse((AttentionKind(4, None, None),), dtype, shape, 16, CPU, is_exact=True))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_in_cpp_comes_first(dtype: torch.dtype) -> None:
    assert candidates(dtype) == NATIVE_AND_TORCH


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "k8v4"])
def test_quantized_pools_use_torch_kernels(kv_dtype: str) -> None:
    assert candidates(torch.float32, kv_dtype) == NATIVE_AND_TORCH[1:]


def test_one_warning_explains_missing_kernels_and_their_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(directory: object) -> None:
        raise NotCompiled("there is no g++ or c++; install GCC")

    monkeypatch.undo()
    on_cpu.native_library.cache_clear()
    monkeypatch.setattr(on_cpu, "load_library", fail)
    with caplog.at_level(logging.INFO):
        assert candidates(torch.float32) == NATIVE_AND_TORCH[1:]
        assert candidates(torch.float32) == NATIVE_AND_TORCH[1:]
    on_cpu.native_library.cache_clear()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            "no compiled kernels, so models on the CPU run 2 to 3 times slower: there is no g++ or c++; install GCC",
        )
    ]
