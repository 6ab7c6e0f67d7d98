"""The attention of a layer on a CPU: two matmuls, norms and a rotary embedding, without calls of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.kernels.cpu.row_tiles import RowFunction
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionCall, AttentionStep

# The keyword for transformers' own cache: since version 5.24 of transformers, and in earlier versions.
_CACHE_KEYWORDS = ("cache", "past_key_values")


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """The attention of one layer, with its projections.

    Attributes:
        layer: index of the layer among those with K and V.
        qkv: computes the concatenated queries, keys and values of each row.
        num_query_heads, num_kv_heads, head_dim: the number of heads, and the elements of each.
        norms: the norms of queries and of keys; empty if there are none.
        rotate: rotates heads `[num_tokens, num_heads, head_dim]`, given cosines and sines `[num_tokens, head_dim]`,
            contiguous and in the same dtype.
        project_output: the output projection.
        scoring: see `AttentionCall`.
    """

    layer: int
    qkv: RowFunction
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[RowFunction, ...]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    project_output: RowFunction
    scoring: Scoring

    def accepts(self, rows: torch.Tensor, position_embeddings: Iterable[torch.Tensor]) -> bool:
        """Whether cosines and sines cover whole heads, are contiguous, and have the dtype of the rows.

        OLMo's cosines and sines are always in float32, so that the products of the rotation are added before they are
        rounded. If the rows have another dtype, transformers therefore computes the attention of OLMo.
        """
        shape = (1, rows.shape[1], self.head_dim)
        return all(
            each.dtype == rows.dtype and each.shape == shape and each.is_contiguous() for each in position_embeddings
        )

    def __call__(
        self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor:
        """Return the attention output, `[1, num_tokens, hidden_size]` like the rows. `accepts` must be true."""
        num_tokens = rows.shape[1]
        cos, sin = (each[0] for each in position_embeddings)  # [num_tokens, head_dim]
        heads = self.qkv(rows).view(num_tokens, -1, self.head_dim)
        num_rotated = self.num_query_heads + self.num_kv_heads
        value = heads[:, num_rotated:]
        if self.norms:
            query, key = heads[:, : self.num_query_heads], heads[:, self.num_query_heads : num_rotated]
            query, key = (norm(each) for norm, each in zip(self.norms, (query, key), strict=True))
            query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)
        else:
            rotated = self.rotate(heads[:, :num_rotated], cos, sin)
            query, key = rotated[:, : self.num_query_heads], rotated[:, self.num_query_heads :]
        attended = step.attend(AttentionCall(self.layer, query, key, value, self.scoring))
        return self.project_output(attended.reshape(1, num_tokens, -1))


def rotate_heads(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads by their positions, as transformers does; shapes as for `FusedAttention.rotate`."""
    cos, sin = cos[:, None], sin[:, None]
    half = heads.shape[-1] // 2
    turned = torch.cat((heads[..., half:].neg(), heads[..., :half]), -1)
    return (heads * cos).add_(turned.mul_(sin))


def has_only_step(kwargs: Mapping[str, Any]) -> bool:
    """Whether a layer gets a step, and neither a mask nor a cache."""
    has_mask_or_cache = any(kwargs.get(name) is not None for name in ("attention_mask", *_CACHE_KEYWORDS))
    return kwargs.get("radix_step") is not None and not has_mask_or_cache
