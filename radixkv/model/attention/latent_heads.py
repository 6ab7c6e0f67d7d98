"""The heads of latent attention (MLA), which all read one stored vector a token.

    stored   [ latent: kv_lora_rank )[ rotated key: qk_rope_head_dim )      one K/V head; the value is the latent
    query    [ W_uk of its head, applied to its first part )[ its rotated part )
    value    W_uv of its head, applied to what the head attended to

Scores and values are those of the keys and values that each head would make of the latents, in another order of sums
(DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from radixkv.errors import UnsupportedModel
from radixkv.kernels.cpu.row_tiles import RowFunction

# Where a layer keeps its heads, and the linear layer in it whose weight they share.
ATTRIBUTE, CHILD = "latent_heads", "kv_b_proj"


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Products of one layer, a weight for each head.

    Attributes:
        rank: numbers in a latent.
        absorb: makes `[num_tokens, num_heads, rank]` of the first parts of queries, `[num_tokens, num_heads, n]`.
        expand: makes values `[num_tokens, num_heads, value_dim]` of latents `[num_tokens, num_heads, rank]`.
        rope_dim: numbers in a rotated key.
    """

    rank: int
    absorb: RowFunction
    expand: RowFunction
    rope_dim: int

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """Turn queries of keys into queries of what is stored.

        Args:
            rows: `[num_tokens, num_heads, n + rope_dim]`, the last numbers rotated.

        Returns:
            `[num_tokens, num_heads, rank + rope_dim]`.
        """
        first, rotated = rows[..., : -self.rope_dim], rows[..., -self.rope_dim :]
        with torch._C.DisableTorchFunction():  # the products are exact by themselves
            return torch.cat((self.absorb(first), rotated), -1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Turn attention over what is stored, `[num_tokens, num_heads, rank + rope_dim]`, into that over values."""
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
    """List the linear layers of a model that see no rows, since heads have their weights."""
    return [getattr(part, CHILD) for part in module.modules() if hasattr(part, ATTRIBUTE)]
