"""Computes the attention of one layer between two products: heads, their norms, rotation, and a step's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from radixkv.kernels.cpu.row_tiles import RowFunction
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionStep


@dataclass(frozen=True, slots=True)
class JoinedAttention:
    """The attention of one layer, between its products.

    Attributes:
        layer: its index.
        product: makes queries, keys and values.
        num_query_heads, num_kv_heads, head_dim: shape.
        norms: of queries and of keys; empty if there are none.
        rotate: rotates heads `[num_tokens, num_heads, head_dim]`, given cosines and sines `[num_tokens, head_dim]`,
            contiguous and in the same dtype.
        down: makes the output of what was attended to.
        scoring: see `AttentionStep`.
    """

    layer: int
    product: RowFunction
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[RowFunction, ...]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    down: RowFunction
    scoring: Scoring

    def takes(self, rows: torch.Tensor, position_embeddings: Iterable[torch.Tensor]) -> bool:
        """Whether cosines and sines are of whole heads, contiguous, and in the dtype of rows.

        Those of OLMo stay in float32, so that products with them are not rounded before they are added.
        """
        shape = (1, rows.shape[1], self.head_dim)
        return all(
            each.dtype == rows.dtype and each.shape == shape and each.is_contiguous() for each in position_embeddings
        )

    def __call__(
        self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor:
        """Return the attention of rows `[1, num_tokens, hidden_size]`, in the same shape, with what it `takes`."""
        num_tokens = rows.shape[1]
        cos, sin = (each[0] for each in position_embeddings)  # [num_tokens, head_dim]
        heads = self.product(rows).view(num_tokens, -1, self.head_dim)
        num_rotated = self.num_query_heads + self.num_kv_heads
        value = heads[:, num_rotated:]
        if self.norms:
            query, key = heads[:, : self.num_query_heads], heads[:, self.num_query_heads : num_rotated]
            query, key = (norm(each) for norm, each in zip(self.norms, (query, key), strict=True))
            query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)
        else:
            both = self.rotate(heads[:, :num_rotated], cos, sin)
            query, key = both[:, : self.num_query_heads], both[:, self.num_query_heads :]
        attended = step.attend(self.layer, query, key, value, self.scoring)
        return self.down(attended.reshape(1, num_tokens, -1))


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads by their positions, as transformers does; shapes as for `JoinedAttention.rotate`."""
    cos, sin = cos[:, None], sin[:, None]
    half = heads.shape[-1] // 2
    turned = torch.cat((heads[..., half:].neg(), heads[..., :half]), -1)
    return (heads * cos).add_(turned.mul_(sin))
