"""Finds out what a model stores and asks for, by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixkv.errors import UnsupportedModel
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionKind
from radixkv.model.attention.probe import probe_attention
from radixkv.storage.device_pool import KVShape

CPU = torch.device("cpu")
SCORING = Scoring(0.25, None, None)


def asking(*layers: tuple[int, int, torch.dtype, Scoring]) -> Callable[..., object]:
    """A forward pass whose layers have an index, a width of values, a dtype and a scoring each."""

    def forward(ids: torch.Tensor, _: torch.Tensor, step: Any, __: torch.Tensor) -> None:
        for layer, value_dim, dtype, scoring in layers:
            query, key = (torch.zeros(len(ids), heads, 16, dtype=dtype) for heads in (4, 2))
            attended = step.attend(layer, query, key, torch.zeros(len(ids), 2, value_dim, dtype=dtype), scoring)
            assert attended.shape == (len(ids), 4, value_dim)

    return forward


def test_shape_and_kinds_are_those_of_the_layers() -> None:
    windowed = Scoring(0.25, 8, 30.0)
    forward = asking(*((layer, 16, torch.float32, windowed if layer == 1 else SCORING) for layer in range(3)))
    shape, kinds = probe_attention("Some", forward, CPU, 3)
    assert shape == KVShape(3, 2, 16, torch.float32)
    full = AttentionKind(4, None, None)
    assert kinds == (full, AttentionKind(4, 8, 30.0), full)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(0, 16, torch.float32, SCORING)], "Some: expected 2 layers to call attention, got 1"),
        ([], "Some: expected 2 layers to call attention, got 0"),
        ([(0, 16, torch.float32, SCORING)] * 2, "Some: expected each layer to attend once a token"),
        ([(layer, 16, torch.float64, SCORING) for layer in range(2)], "Some: expected K/V of float32"),
        (
            [(layer, 8, torch.float32, SCORING) for layer in range(2)],
            "Some: expected keys and values of one size, got 16 and 8",
        ),
        (
            [(layer, 16 - layer, torch.float32, SCORING) for layer in range(2)],
            "keys and values of one size, got 16 and 15",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: list[tuple[int, int, torch.dtype, Scoring]], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        probe_attention("Some", asking(*layers), CPU, 2)
