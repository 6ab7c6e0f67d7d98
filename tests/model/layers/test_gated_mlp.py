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
from tests.model.layers.test_packed_linear import Given

WIDTHS = {"hidden_size": 96, "intermediate_size": 160}
GATING = [
    name for name in gemm_backends(torch.empty(1, 1, dtype=torch.bfloat16)) if GEMM_BACKENDS[name].gate is not None
]
pytestmark = pytest.mark.skipif(not GATING, reason="no library multiplies bfloat16 on this machine")


def made(*, bias: bool = False, activation: str = "silu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """The MLP of a layer, with random weights."""
    torch.manual_seed(0)
    mlp = LlamaMLP(LlamaConfig(**WIDTHS, mlp_bias=bias, hidden_act=activation)).eval().requires_grad_(False).to(dtype)
    for parameter in mlp.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype) / 4
    return mlp


def packed(mlp: Any, backend: str, *, is_exact: bool) -> Any:
    parent = nn.ModuleDict({"mlp": mlp})
    parent.get_output_embeddings = lambda: None
    pack_linears(parent, Given(backend, is_exact=is_exact))
    return mlp


def rows_of(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, count, WIDTHS["hidden_size"], generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", GATING)
def test_a_fused_gate_agrees_with_the_module(backend: str, *, bias: bool, is_exact: bool) -> None:
    wide = made(bias=bias).float()
    gates: set[tuple[int, int]] = set()
    mlp = packed(made(bias=bias), backend, is_exact=is_exact)
    assert has_fusible_gate(mlp)
    function = try_mlp(mlp, torch.bfloat16, is_exact=is_exact, tried_gates=gates)
    assert gates == {(96, 160)}
    for count in (1, 2, 17, 100):
        rows = rows_of(count)
        got, expected = function(rows).float(), wide(rows.float())
        assert got.shape == expected.shape
        assert ((got - expected).abs() <= 0.02 * expected.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("count", [1, 2, 3, 15, 17, 64, 101, 512, 700])
@pytest.mark.parametrize("backend", GATING)
def test_a_fused_gate_is_batch_invariant(backend: str, count: int) -> None:
    weight = torch.randn(160, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    choice = choose_gemm(weight, None, (backend,), is_exact=True)
    if choice is None:
        pytest.skip("this machine does not compute rows of this backend alike")
    gate, up = Matmul([weight], None, choice), Matmul([weight.flip(0).contiguous()], None, choice)
    rows = rows_of(700)[0]
    assert torch.equal(gate.gate(rows[:count], up), gate.gate(rows, up)[:count])
    assert torch.equal(gate.gate(rows[-count:], up), gate.gate(rows, up)[-count:])


def test_float32_and_other_activations_use_one_matmul_for_gate_and_up() -> None:
    for mlp in (made(dtype=torch.float32), made(activation="gelu")):
        packed(mlp, "blocked", is_exact=True)
        assert is_joined(mlp.gate_proj, mlp.up_proj, last=mlp.down_proj)
        assert not has_fusible_gate(mlp)


def test_a_fused_gate_with_different_results_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (lambda gated: 1.05 * gated, lambda gated: gated + gated.shape[0]):
        mlp = packed(made(), "blocked", is_exact=True)
        product = mlp.gate_proj.matmul
        own = product._gate
        product._gate = lambda *args, own=own, change=change: change(own(*args))
        with pytest.raises(Refused, match="something else"):
            try_mlp(mlp, torch.bfloat16, is_exact=True, tried_gates=set())


def test_a_fused_gate_that_is_not_batch_invariant_is_rejected_in_exact_mode() -> None:
    mlp = packed(made(), "blocked", is_exact=True)
    product = mlp.gate_proj.matmul
    own = product._gate

    def gate(rows: torch.Tensor, *args: Any) -> torch.Tensor:
        gated: torch.Tensor = own(rows, *args)
        return gated if len(rows) > 2 else gated * (1 + torch.finfo(gated.dtype).eps)

    product._gate = gate
    with pytest.raises(Refused, match="something else"):
        try_mlp(mlp, torch.bfloat16, is_exact=True, tried_gates=set())


def test_a_shape_is_tried_once() -> None:
    mlp = packed(made(), "blocked", is_exact=True)
    product, calls = mlp.gate_proj.matmul, []
    own = product._gate
    product._gate = lambda *args: calls.append(len(args[0])) or own(*args)
    gates: set[tuple[int, int]] = set()
    try_mlp(mlp, torch.bfloat16, is_exact=True, tried_gates=gates)
    assert calls
    calls.clear()
    try_mlp(mlp, torch.bfloat16, is_exact=True, tried_gates=gates)
    assert calls == []


def test_layers_that_are_not_packed_are_neither_merged_nor_fused() -> None:
    mlp = made()
    assert not has_fusible_gate(mlp)
    assert not is_joined(mlp.gate_proj, mlp.up_proj, last=mlp.down_proj)
    part = SimpleNamespace(act_fn=nn.Tanh(), gate_proj=mlp.gate_proj, up_proj=mlp.up_proj, down_proj=mlp.down_proj)
    assert not has_fusible_gate(part)
    weight = torch.randn(4, 4).bfloat16()
    assert not PackedLinear(Matmul([weight], None, GemmChoice("plain"))).matmul.can_gate
