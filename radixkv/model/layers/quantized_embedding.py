"""An embedding whose weight stays quantized: the rows of each call are dequantized."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from radixkv.kernels.native.gemm import QuantizedPanels


class QuantizedEmbedding(nn.Module):
    """Replaces an embedding. The bits of its output are those of the embedding with the dequantized weight.

    Args:
        embedding: the embedding, whose own weight is not read. Its class may scale what it looks up, as Gemma's does.
        panels: its weight `[num_embeddings, embedding_dim]`. A language modeling head may share it.
    """

    def __init__(self, embedding: nn.Embedding, panels: QuantizedPanels) -> None:
        super().__init__()
        embedding.padding_idx = None  # only gradients depend on it
        self._embedding = (embedding,)  # in a tuple, so that its unused weight is not a parameter of the model
        self._is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
        self._panels = panels

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[..., embedding_dim]` of token ids `[...]`."""
        with torch._C.DisableTorchFunction():  # elementwise operations are exact by themselves
            rows = self._panels.rows(input_ids.flatten()).dequantize().to(self._panels.dtype)
            if self._is_plain:
                return rows.view(*input_ids.shape, -1)
            # Let the embedding look up these rows in order, so that its class can change what it looks up.
            row_indices = torch.arange(len(rows)).view(input_ids.shape)
            output: torch.Tensor = functional_call(self._embedding[0], {"weight": rows}, (row_indices,))
        return output
