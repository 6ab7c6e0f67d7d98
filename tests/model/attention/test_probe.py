"""The probe determines what a model stores and reads by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixkv.errors import UnsupportedModel
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionCall, AttentionKind
from radixkv.model.attention.probe import probe_attention
from radixkv.storage.device_pool import KVHeads, KVShape

CPU = torch.device("cpu")
SCORING = Scoring(0.25, None, None)


def forward_of(*layers: tuple[int, int, torch.dtype, Scoring]) -> Callable[..., object]:
    """Make a forward pass that calls attention for each layer: its index, the size of values, dtype and scoring."""

    def forward(ids: torch.Tensor, _: torch.Tensor, step: Any, __: torch.Tensor) -> None:
        for layer, value_dim, dtype, scoring in layers:
            query, key = (torch.zeros(len(ids), heads, 16, dtype=dtype) for heads in (4, 2))
            attended = step.attend(
                AttentionCall(layer, query, key, torch.zeros(len(ids), 2, value_dim, dtype=dtype), scoring)
            )
            assert attended.shape == (len(ids), 4, value_dim)

    return forward


def test_shape_and_kinds_match_the_layers() -> None:
    windowed = Scoring(0.25, 8, 30.0)
    forward = forward_of(*((layer, 16, torch.float32, windowed if layer == 1 else SCORING) for layer in range(3)))
    shape, kinds = probe_attention("Some", forward, CPU, 3)
    assert shape == KVShape(3, 2, 16, torch.float32)
    full = AttentionKind(4, None, None)
    assert kinds == (full, AttentionKind(4, 8, 30.0), full)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(0, 16, torch.float32, SCORING)], "Some: expected 2 layers to call attention, got 1"),
        ([], "Some: expected 2 layers to call attention, got 0"),
        ([(0, 16, torch.float32, SCORING)] * 2, "Some: expected one attention call per layer and token"),
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
        probe_attention("Some", forward_of(*layers), CPU, 2)


def forward_with_different_heads(ids: torch.Tensor, _: torch.Tensor, step: Any, __: torch.Tensor) -> None:
    """A forward pass of three layers, of which the second has twice the KV heads, of half the size."""
    for layer, (num_heads, head_dim) in enumerate([(2, 16), (4, 8), (2, 16)]):
        key = torch.zeros(len(ids), num_heads, head_dim)
        step.attend(AttentionCall(layer, torch.zeros(len(ids), 4, head_dim), key, key, SCORING))


def test_layers_may_have_different_heads() -> None:
    shape, kinds = probe_attention("Some", forward_with_different_heads, CPU, 3)
    assert shape.heads == (KVHeads(2, 16), KVHeads(4, 8), KVHeads(2, 16))
    assert shape.layers_by_heads == ((0, 2), (1,))
    assert len(kinds) == 3


def test_layers_with_different_heads_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, ones, arange = torch.zeros, torch.ones, torch.arange
    for name, make in (("zeros", zeros), ("ones", ones), ("arange", arange)):  # ignore `device`, since there is no GPU
        monkeypatch.setattr(torch, name, lambda *size, device=None, make=make, **rest: make(*size, **rest))
    with pytest.raises(UnsupportedModel, match="Some: layers with K/V of different shapes: expected model"):
        probe_attention("Some", forward_with_different_heads, torch.device("cuda"), 3)


def test_layers_with_different_heads_are_refused_next_to_short_convolutions() -> None:
    def forward(ids: torch.Tensor, positions: torch.Tensor, step: Any, rows: torch.Tensor) -> None:
        forward_with_different_heads(ids, positions, step, rows)
        step.convolve(0, torch.zeros(2, 4), torch.zeros(1), None)

    with pytest.raises(UnsupportedModel, match="expected one K/V shape in a model with short convolutions"):
        probe_attention("Some", forward, CPU, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_latents_and_heads_or_two_dtypes_is_rejected(dtype: torch.dtype) -> None:
    def forward(ids: torch.Tensor, _: torch.Tensor, step: Any, __: torch.Tensor) -> None:
        for layer in range(2):
            key = torch.zeros(len(ids), 2, 16, dtype=dtype if layer else torch.float32)
            has_value = not layer or dtype != torch.float32
            step.attend(AttentionCall(layer, torch.zeros(len(ids), 4, 16), key, key if has_value else None, SCORING))

    with pytest.raises(UnsupportedModel, match="expected K/V of one dtype, in all layers or in none as latents"):
        probe_attention("Some", forward, CPU, 2)
