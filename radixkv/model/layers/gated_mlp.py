"""Computes a gated MLP on a CPU in two matmuls, or in three if the library fuses the activation into the matmul.

merged     gate and up in one matmul; activation and multiplication; down       any library and activation
fused      gate with SiLU; up, multiplied by it within the matmul; down         oneDNN and C++ in bfloat16
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import activations

from radixkv.kernels.cpu.row_pieces import in_row_pieces
from radixkv.kernels.cpu.row_tiles import RowFunction
from radixkv.model.layers.packed_linear import SILU, Matmul, PackedLinear, PackedSlice
from radixkv.model.layers.replaced_parts import Refused, agree, require, with_replaced_children

# Elementwise activations, which exact mode may compute in pieces of rows.
_ACTIVATIONS = (
    *(*SILU, nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid, activations.GELUActivation, activations.GELUTanh),
    *(activations.NewGELUActivation, activations.QuickGELUActivation, activations.ReLUSquaredActivation),
)

_GATED_ROWS = 64  # row count of the check of a fused gate that allows any row count
# Tolerance of the check, relative to the largest element of a row. The library rounds once or twice, the module four
# times: after both matmuls, after SiLU and after the multiplication.
_ROUNDINGS = 4


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """A gated MLP as a function of rows.

    Attributes:
        gate: the matmul of the gate projection, merged with the up projection if `up` is None.
        up: the matmul of the up projection, if the library fuses it with the gate; otherwise None.
        gate_rows: takes rows of the merged output, and returns `act(gate) * up`.
        down: the matmul of the down projection.
    """

    gate: Matmul
    up: Matmul | None
    gate_rows: RowFunction
    down: Matmul

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the MLP to rows."""
        if self.up is None:
            return self.down(self.gate_rows(self.gate(rows)))
        return self.down(self.gate.gate(rows, self.up))


def is_joined(*layers: nn.Module, last: nn.Module) -> bool:
    """Whether layers are the parts of one merged matmul, and the layer `last` is packed."""
    if not isinstance(last, PackedLinear) or not all(isinstance(layer, PackedSlice) for layer in layers):
        return False
    return len({id(layer.joined) for layer in layers}) == 1


def has_fusible_gate(mlp: Any) -> bool:
    """Whether a library fuses SiLU into the gate's matmul, and the multiplication into the up projection's matmul."""
    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        type(mlp.act_fn) in SILU
        and all(isinstance(layer, PackedLinear) for layer in layers)
        and mlp.gate_proj.matmul.can_gate
        and mlp.up_proj.matmul.can_gate
    )


def try_mlp(
    mlp: Any,
    dtype: torch.dtype,
    *,
    is_exact: bool,
    tried_gates: set[tuple[int, int]],
    native_gate: RowFunction | None = None,
) -> GatedMLP:
    """Return a fused function of rows for an MLP that `is_joined` or `has_fusible_gate`, after checking it.

    Args:
        mlp: the module.
        dtype: dtype of its rows.
        is_exact: whether results must be batch-invariant.
        tried_gates: `(in_features, out_features)` of the fused gates that were checked before. A newly checked one is
            added.
        native_gate: SiLU of the first half of a row times the second half, in C++; None if there is none.

    Raises:
        Refused: the activation is not known to be elementwise, or the results of the function and of the module differ.
    """
    if type(mlp.act_fn) not in _ACTIVATIONS:
        raise Refused(f"its activation is {type(mlp.act_fn).__name__}")
    act = partial(in_row_pieces, mlp.act_fn.forward) if is_exact else mlp.act_fn.forward
    simplified = with_replaced_children(
        mlp, {"gate_proj": lambda rows: rows, "up_proj": lambda rows: rows.flip(-1), "down_proj": lambda rows: rows}
    )
    gate_rows = native_gate if native_gate and type(mlp.act_fn) in SILU else partial(_gate_rows, act=act)

    def fused(rows: torch.Tensor) -> torch.Tensor:
        return gate_rows(torch.cat((rows, rows.flip(-1)), -1))

    require(agree(simplified.forward, fused, torch.empty(mlp.down_proj.in_features, dtype=dtype)))
    if not has_fusible_gate(mlp):
        return GatedMLP(mlp.gate_proj.joined.matmul, None, gate_rows, mlp.down_proj.matmul)
    gate, up = mlp.gate_proj.matmul, mlp.up_proj.matmul
    shape = (gate.in_features, gate.out_features)
    if shape not in tried_gates:
        _try_gate(gate, up)
        tried_gates.add(shape)
    return GatedMLP(gate, up, gate_rows, mlp.down_proj.matmul)


def _try_gate(gate: Matmul, up: Matmul) -> None:
    """Raise `Refused` unless the fused gate is accurate, and bitwise identical for all allowed row counts."""
    row_counts = gate.row_counts or (1, _GATED_ROWS)
    rows = torch.randn(max(row_counts), gate.in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = gate.gate(rows, up)
    expected = nn.functional.silu(gate(rows).float()) * up(rows).float()
    bound = _ROUNDINGS * torch.finfo(rows.dtype).eps * expected.abs().amax(-1, keepdim=True)
    require(bool(((whole.float() - expected).abs() <= bound).all()))
    for count in gate.row_counts:
        require(torch.equal(gate.gate(rows[:count], up), whole[:count]))
        require(torch.equal(gate.gate(rows[-count:], up), whole[-count:]))


def _gate_rows(gate_and_up: torch.Tensor, act: RowFunction) -> torch.Tensor:
    width = gate_and_up.shape[-1] // 2
    return act(gate_and_up[..., :width]).mul_(gate_and_up[..., width:])
