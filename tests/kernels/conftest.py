import pytest
import torch

from .gpu.interpreter import interpret_kernels


@pytest.fixture
def kernel_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that Triton kernels are tested on: the GPU, or the CPU through the interpreter."""
    if torch.cuda.is_available():
        return "cuda"
    interpret_kernels(monkeypatch)
    return "cpu"
