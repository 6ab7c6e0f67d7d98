"""Fused gated MLPs give the module's results for any number of rows, and modules with other results are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, gemm_backends
from radixkv.kernels.cpu.gemm_trial import GemmChoice, choose_gemm
from radixkv.model.layers.gated_mlp import has_fusible_gate, is_joined, try_mlp
from radixkv.model.layers.packed_linear import Matmul, PackedLinear, pack_linears
from radixkv.model.layers.replaced_parts import Refused
from tests.model.layers.test_packed_linear import FixedBackendTuner

WIDTHS = {"hidden_size": 96, "intermediate_size": 160}
GATING_BACKENDS = [
    name for name in gemm_backends(torch.empty(1, 1, dtype=torch.bfloat16)) if GEMM_BACKENDS[name].gate is not None
]
pytestmark = pytest.mark.skipif(not GATING_BACKENDS, reason="no library has a fused gate for bfloat16 on this machine")


def make_mlp(*, bias: bool = False, activation: str = "silu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Make the MLP of a layer, with random weights."""
    torch.manual_seed(0)
    mlp = LlamaMLP(LlamaConfig(**WIDTHS, mlp_bias=bias, hidden_act=activation)).eval().requires_grad_(False).to(dtype)
    for parameter in mlp.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype) / 4
    return mlp


def pack_mlp(mlp: Any, backend: str, *, is_exact: bool) -> Any:
    """Replace the linear layers of an MLP by packed ones, and return it."""
    parent = nn.ModuleDict({"mlp": mlp})
    parent.get_output_embeddings = lambda: None
    pack_linears(parent, FixedBackendTuner(backend, is_exact=is_exact))
    return mlp


def rows_of(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, count, WIDTHS["hidden_size"], generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", GATING_BACKENDS)
def test_a_fused_gate_agrees_with_the_module(backend: str, *, bias: bool, is_exact: bool) -> None:
    wide = make_mlp(bias=bias).float()
    tried_shapes: set[tuple[int, int]] = set()
    mlp = pack_mlp(make_mlp(bias=bias), backend, is_exact=is_exact)
    assert has_fusible_gate(mlp)
    function = try_mlp(mlp, torch.bfloat16, is_exact=is_exact, tried_gates=tried_shapes)
    assert tried_shapes == {(96, 160)}
    for count in (1, 2, 17, 100):
        rows = rows_of(count)
        got, expected = function(rows).float(), wide(rows.float())
        assert got.shape == expected.shape
        assert ((got - expected).abs() <= 0.02 * expected.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("count", [1, 2, 3, 15, 17, 64, 101, 512, 700])
@pytest.mark.parametrize("backend", GATING_BACKENDS)
def test_a_fused_gate_is_batch_invariant(backend: str, count: int) -> None:
    weight = torch.randn(160, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    choice = choose_gemm(weight, None, (backend,), is_exact=True)
    if choice is None:
        pytest.skip("this backend is not batch-invariant on this machine")
    gate, up = Matmul([weight], None, choice), Matmul([weight.flip(0).contiguous()], None, choice)
    rows = rows_of(700)[0]
    assert torch.equal(gate.gate(rows[:count], up), gate.gate(rows, up)[:count])
    assert torch.equal(gate.gate(rows[-count:], up), gate.gate(rows, up)[-count:])


def test_float32_and_other_activations_use_one_matmul_for_gate_and_up() -> None:
    for mlp in (make_mlp(dtype=torch.float32), make_mlp(activation="gelu")):
        pack_mlp(mlp, "blocked", is_exact=True)
        assert is_joined(mlp.gate_proj, mlp.up_proj, last=mlp.down_proj)
        assert not has_fusible_gate(mlp)


def test_a_fused_gate_with_different_results_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (lambda gated: 1.05 * gated, lambda gated: gated + gated.shape[0]):
        mlp = pack_mlp(make_mlp(), "blocked", is_exact=True)
        matmul = mlp.gate_proj.matmul
        original_gate = matmul._gate
        matmul._gate = lambda *args, original_gate=original_gate, change=change: change(original_gate(*args))
        with pytest.raises(Refused, match="something else"):
            try_mlp(mlp, torch.bfloat16, is_exact=True, tried_gates=set())


def test_a_fused_gate_that_is_not_batch_invariant_is_rejected_in_exact_mode() -> None:
    mlp = pack_mlp(make_mlp(), "blocked", is_exact=True)
    matmul = mlp.gate_proj.matmul
    original_gate = matmul._gate

    def gate(rows: torch.Tensor, *args: Any) -> torch.Tensor:
        gated: torch.Tensor = original_gate(rows, *args)
        return gated if len(rows) > 2 else gated * (1 + torch.finfo(gated.dtype).eps)

    matmul._gate = gate
    with pytest.raises(Refused, match="something else"):
        try_mlp(mlp, torch.bfloat16, is_exact=True, tried_gates=set())


def test_a_shape_is_tried_once() -> None:
    mlp = pack_mlp(make_mlp(), "blocked", is_exact=True)
    matmul, row_counts = mlp.gate_proj.matmul, []
    original_gate = matmul._gate

    def record_and_gate(rows: torch.Tensor, *args: Any) -> torch.Tensor:
        row_counts.append(len(rows))
        return original_gate(rows, *args)

    matmul._gate = record_and_gate
    tried_shapes: set[tuple[int, int]] = set()
    try_mlp(mlp, torch.bfloat16, is_exact=True, tried_gates=tried_shapes)
    assert row_counts
    row_counts.clear()
    try_mlp(mlp, torch.bfloat16, is_exact=True, tried_gates=tried_shapes)
    assert row_counts == []


def test_layers_that_are_not_packed_are_neither_merged_nor_fused() -> None:
    mlp = make_mlp()
    assert not has_fusible_gate(mlp)
    assert not is_joined(mlp.gate_proj, mlp.up_proj, last=mlp.down_proj)
    part = SimpleNamespace(act_fn=nn.Tanh(), gate_proj=mlp.gate_proj, up_proj=mlp.up_proj, down_proj=mlp.down_proj)
    assert not has_fusible_gate(part)
    weight = torch.randn(4, 4).bfloat16()
    assert not PackedLinear(Matmul([weight], None, GemmChoice("plain"))).matmul.can_gate
