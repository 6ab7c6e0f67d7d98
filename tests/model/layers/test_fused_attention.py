"""Unsupported rotary embeddings are left to the original module, and the answers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.layers.fused_attention import FusedAttention, rotate_heads
from radixkv.model.model import Model
from radixkv.model.on_cpu import native_library
from tests.model.coverage.small_configs import small_config
from tests.model.layers.test_cpu_layers import CPU, answer, make, replaced, swap_class

ATTENTION = FusedAttention(0, nn.Identity(), 2, 1, 8, (), rotate_heads, nn.Identity(), Scoring(1.0))


@pytest.fixture(params=["C++", "torch"], autouse=True)
def between_matmuls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms, rotations and gates be computed in C++, or by torch; matmuls always by torch."""
    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.gemm_backends", lambda _: ("plain",))
    if request.param == "torch":
        monkeypatch.setattr("radixkv.model.model.native_library", lambda: None)
    elif native_library() is None:
        pytest.skip("there are no kernels in C++ on this machine")


@pytest.fixture
def fused_row_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of a fused attention."""
    row_counts: list[int] = []
    fused_call = FusedAttention.__call__

    def record_and_call(self: FusedAttention, rows: torch.Tensor, *args: Any) -> torch.Tensor:
        row_counts.append(rows.shape[1])
        return fused_call(self, rows, *args)

    monkeypatch.setattr(FusedAttention, "__call__", record_and_call)
    return row_counts


def test_only_cosines_and_sines_like_those_of_the_trial_are_accepted() -> None:
    rows, angles = torch.zeros(1, 3, 16).bfloat16(), torch.zeros(1, 3, 8).bfloat16()
    assert ATTENTION.accepts(rows, (angles, angles))
    for other in (angles.float(), angles.half(), angles[..., :4], angles[:, :2], angles.mT.contiguous().mT):
        assert not ATTENTION.accepts(rows, (angles, other))
        assert not ATTENTION.accepts(rows, (other, angles))


def half_olmo() -> PreTrainedModel:
    """Make a model in bfloat16 whose cosines and sines are float32."""
    torch.manual_seed(0)
    config = small_config("olmo")
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16).eval()


def strided_llama() -> PreTrainedModel:
    """Make a model whose cosines and sines are not contiguous."""
    module = make("llama")

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(each.mT.contiguous().mT for each in super(type(self), self).forward(*args, **kwargs))

    swap_class(module.model.rotary_emb, forward)
    return module


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("make_odd", [half_olmo, strided_llama])
def test_other_rope_variants_are_left_to_the_module(
    make_odd: Callable[[], PreTrainedModel], fused_row_counts: list[int], *, is_exact: bool
) -> None:
    model = Model("odd", make_odd(), CPU, is_exact=is_exact)
    assert "model.layers.0.self_attn" in replaced(model.module)
    fused_row_counts.clear()
    got, step = answer(model, 19)
    assert fused_row_counts == []
    expected, expected_step = answer(Model("odd", make_odd(), CPU, is_exact=is_exact, is_fused=False), 19)
    tolerance = 0.05 if got.dtype == torch.bfloat16 else 1e-4
    for tensor, expected_tensor in zip((got, *step.tensors), (expected, *expected_step.tensors), strict=True):
        assert (tensor.float() - expected_tensor.float()).norm() <= tolerance * expected_tensor.float().norm()
    if is_exact:
        assert torch.equal(answer(model, 1)[0][0], got[0])
