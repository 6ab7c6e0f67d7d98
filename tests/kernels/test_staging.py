"""The inputs of a step are copied to the device. Without a GPU, fakes record the calls of torch."""

from __future__ import annotations

import pytest
import torch

from radixkv.kernels.staging import StagedArrays, to_device


def test_on_a_cpu_the_memory_is_shared() -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert to_device(tensor, "cpu") is tensor


def test_copies_to_a_gpu_do_not_block_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return tensor.clone()

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        calls.append((device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    device = torch.device("cuda", 1)
    assert to_device(torch.arange(3), device).tolist() == [0, 1, 2]
    assert calls == ["pinned", (device, True)]


def test_refilled_arrays_are_copied_together() -> None:
    arrays = StagedArrays({"bytes": ((3,), torch.uint8), "table": ((2, 5), torch.int32)}, torch.device("cpu"))
    addresses = [tensor.data_ptr() for tensor in arrays.device.values()]
    for number in (1, 2):
        for num_rows in (1, 2):
            arrays.host["bytes"][1] = number
            arrays.host["table"][1] = 10 * number
            arrays.upload(num_rows)
            if num_rows == 1:
                assert arrays.device["table"][1].tolist() == [10 * (number - 1)] * 5, (
                    "rows that are not uploaded keep their values"
                )
        assert arrays.device["bytes"].tolist() == [0, number, 0]
        assert arrays.device["table"].tolist() == [[0] * 5, [10 * number] * 5]
    assert [tensor.data_ptr() for tensor in arrays.device.values()] == addresses
    assert all((address - addresses[0]) % 16 == 0 for address in addresses)


def test_the_next_arrays_are_filled_while_the_last_ones_are_copied() -> None:
    arrays = StagedArrays({"ids": ((3,), torch.int64)}, torch.device("cpu"))
    first = arrays.host["ids"].fill_(1)
    arrays.upload(3)
    arrays.host["ids"].fill_(2)
    assert first.tolist() == arrays.device["ids"].tolist() == [1, 1, 1], (
        "the first memory is not refilled: its copy may not have ended"
    )
    arrays.upload(3)
    assert arrays.device["ids"].tolist() == [2, 2, 2]
    assert arrays.host["ids"].data_ptr() == first.data_ptr(), "the first copy has ended, so its memory is filled again"


def test_a_gpu_fills_from_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    zeros = torch.zeros

    def pinned(num_bytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        calls.append("pinned" if pin_memory else "pageable")
        return zeros(num_bytes, dtype=dtype)

    def on_device(region: torch.Tensor, *, device: torch.device) -> torch.Tensor:
        calls.append(device.type)
        return region.clone()

    monkeypatch.setattr(torch, "zeros", pinned)
    monkeypatch.setattr(torch, "zeros_like", on_device)
    arrays = StagedArrays({"ids": ((3,), torch.int64)}, torch.device("cuda"))

    def copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        calls.append((target.numel(), source.numel(), non_blocking))

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    arrays.upload(3)
    assert calls == ["pinned", "pinned", "cuda", (24, 24, True)]
