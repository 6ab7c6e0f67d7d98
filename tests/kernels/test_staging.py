"""What a step needs comes to the device; there is none here, so what is asked of torch is noted."""

from __future__ import annotations

import pytest
import torch

from radixkv.kernels.staging import to_device


def test_on_a_cpu_the_memory_is_shared() -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert to_device(tensor, "cpu") is tensor


def test_to_a_gpu_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        asked.append("pinned")
        return tensor.clone()

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        asked.append((device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    device = torch.device("cuda", 1)
    assert to_device(torch.arange(3), device).tolist() == [0, 1, 2]
    assert asked == ["pinned", (device, True)]
