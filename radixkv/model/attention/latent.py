"""Makes layers with latent attention (MLA) store latents in the cache instead of the keys and values of each head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from radixkv.errors import UnsupportedModel
from radixkv.kernels.cpu.row_tiles import RowFunction
from radixkv.model.layers.gemm_tuner import GemmTuner, TrialBudget
from radixkv.model.layers.packed_linear import Matmul
from radixkv.model.layers.replaced_parts import ReplacedMethods, is_close
from radixkv.model.refusals import SERVE_FAST

# The name of a layer's attribute that holds its `LatentHeads`, and the name of the linear layer whose weight they use.
ATTRIBUTE, CHILD = "latent_heads", "kv_b_proj"


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The matmuls of latent attention in one layer, with a weight per head.

    Attributes:
        rank: dimension of a latent.
        absorb: maps the part of queries without RoPE, `[num_tokens, num_heads, n]`, to `[num_tokens, num_heads, rank]`.
        expand: maps latents `[num_tokens, num_heads, rank]` to values `[num_tokens, num_heads, value_dim]`.
        rope_dim: dimension of the part of a key with RoPE.
    """

    rank: int
    absorb: RowFunction
    expand: RowFunction
    rope_dim: int

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """Map queries for keys to queries for stored latents.

        Args:
            rows: `[num_tokens, num_heads, n + rope_dim]`; the last `rope_dim` numbers are rotated.

        Returns:
            `[num_tokens, num_heads, rank + rope_dim]`.
        """
        unrotated, rotated = rows[..., : -self.rope_dim], rows[..., -self.rope_dim :]
        with torch._C.DisableTorchFunction():  # the matmuls are exact by themselves
            return torch.cat((self.absorb(unrotated), rotated), -1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Map attention over stored latents, `[num_tokens, num_heads, rank + rope_dim]`, to attention over values."""
        with torch._C.DisableTorchFunction():
            return self.expand(attended[..., : self.rank])


def latent_heads_of(module: nn.Module) -> LatentHeads:
    """Return the heads of a layer that passes no values to its attention.

    Raises:
        UnsupportedModel: the layer is not known to have latents.
    """
    heads = getattr(module, ATTRIBUTE, None)
    if not isinstance(heads, LatentHeads):
        raise UnsupportedModel(f"{type(module).__name__}: expected values to attend to, got none")
    return heads


def absorbed_layers(module: nn.Module) -> list[nn.Module]:
    """List the linear layers of a model that are never called, since `LatentHeads` use their weights."""
    return [getattr(part, CHILD) for part in module.modules() if hasattr(part, ATTRIBUTE)]


# The method of transformers' layers that computes keys and values from latents.
_METHOD = "expand_kv"

_TRIAL_TOKENS = 5


class LatentParts(ReplacedMethods):
    """Replaces the method of a model's layers that computes keys and values from latents. Nothing else changes.

    Args:
        module: the model, on its device and in evaluation mode, before its linear layers are packed.
        is_exact: whether results must be batch-invariant.
        budget: time for trials of matmuls, in exact mode; None for no bound.

    Raises:
        UnsupportedModel: the model has latents, but its layers do not use them as `LatentHeads` does, or no matmul for
            them is batch-invariant although results must be.
    """

    def __init__(self, module: PreTrainedModel, *, is_exact: bool, budget: TrialBudget | None = None) -> None:
        parts: list[Any] = []
        tuner = GemmTuner(is_exact=is_exact, budget=budget)
        for part in module.modules():
            if hasattr(part, _METHOD) and hasattr(part, CHILD):
                heads = _latent_heads(part, tuner if is_exact else None)
                _require_agreement(part, heads)
                setattr(part, ATTRIBUTE, heads)
                parts.append(part)
        rank = getattr(module.config.get_text_config(), "kv_lora_rank", None)
        if rank and not parts:
            raise UnsupportedModel(
                f"{type(module).__name__}: expected layers with a method {_METHOD} for their latents (kv_lora_rank "
                f"{rank}), as newer versions of transformers have, got none"
            )
        super().__init__(_METHOD, dict.fromkeys(parts, _join_latents))


def _join_latents(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Concatenate latents `[1, 1, num_tokens, rank]` and rotated keys. The result is stored as both key and value."""
    return torch.cat((latent, rotated), -1), None


def _latent_heads(part: Any, tuner: GemmTuner | None) -> LatentHeads:
    """Create the matmuls of one layer; batch-invariant ones if `tuner` is given."""
    name, layer = type(part).__name__, getattr(part, CHILD)
    if getattr(part, "indexer", None) is not None:
        raise UnsupportedModel(f"{name}: expected attention to all latents, got an indexer that chooses some")
    sizes = [getattr(part, key, None) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    rank, nope_dim, rope_dim, value_dim = (size if isinstance(size, int) else 0 for size in sizes)
    is_known = type(layer) is nn.Linear and layer.bias is None and min(rank, nope_dim, rope_dim, value_dim) > 0
    if not is_known or layer.in_features != rank or layer.out_features % (nope_dim + value_dim):
        raise UnsupportedModel(f"{name}: expected {CHILD} to compute keys and values from latents, got {layer}")
    weight_by_head = layer.weight.detach().view(-1, nope_dim + value_dim, rank)
    make_matmul = _batched_matmul if tuner is None else partial(_matmul_per_head, name=f"{name}.{CHILD}", tuner=tuner)
    absorb, expand = make_matmul(weight_by_head[:, :nope_dim].mT), make_matmul(weight_by_head[:, nope_dim:])
    return LatentHeads(rank, absorb, expand, rope_dim)


def _batched_matmul(weights: torch.Tensor) -> RowFunction:
    """Return a batched matmul of all heads with weights `[num_heads, out_features, in_features]`."""
    transposed = weights.mT.contiguous()
    return lambda rows: torch.bmm(rows.transpose(0, 1), transposed).transpose(0, 1)


def _matmul_per_head(weights: torch.Tensor, *, name: str, tuner: GemmTuner) -> RowFunction:
    """Return a function with one matmul per head, whose results are batch-invariant."""
    weights = weights.contiguous()
    choice = tuner.choose(weights[0], None)
    if choice is None:
        raise UnsupportedModel(
            f"{name}: no batch-invariant matmul for a weight of shape {tuple(weights.shape[1:])} in {weights.dtype} on "
            f"this machine; {SERVE_FAST}"
        )
    matmuls = [Matmul([weight], None, choice) for weight in weights]
    return lambda rows: torch.stack([matmul(rows[:, head]) for head, matmul in enumerate(matmuls)], 1)


@torch.inference_mode()
def _require_agreement(part: Any, heads: LatentHeads) -> None:
    """Check on random rows that `heads` give the same scores and values as a layer's own keys and values.

    Raises:
        UnsupportedModel: the scores or the values differ.
    """
    weight = getattr(part, CHILD).weight
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(weight)

    latent, rotated = random(1, 1, _TRIAL_TOKENS, heads.rank), random(1, 1, _TRIAL_TOKENS, heads.rope_dim)
    key, value = getattr(part, _METHOD)(latent, rotated)  # [1, num_heads, num_tokens, dim]
    query = random(_TRIAL_TOKENS, key.shape[1], key.shape[3])
    stored, _ = _join_latents(latent, rotated)
    own_scores = torch.einsum("qhd,hkd->hqk", query, key[0])
    scores = torch.einsum("qhd,kd->hqk", heads.queries(query), stored[0, 0])
    own_values = value[0].transpose(0, 1)
    values = heads.values(stored[0].transpose(0, 1).expand(-1, key.shape[1], -1))
    for expected, got in ((own_scores, scores), (own_values, values)):
        if not is_close(expected, got):
            raise UnsupportedModel(f"{type(part).__name__}: expected {_METHOD} to apply only {CHILD}, got more")
