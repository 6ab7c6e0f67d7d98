"""Inputs for kernels that work on rows: hidden states of a layer, the activations of its MLP, and linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from bench.parts.attention_inputs import worst_error
from bench.parts.device_time import num_input_sets
from bench.parts.kernel_row import Contestant
from radixkv.kernels import reference
from radixkv.kernels.norm_style import LLAMA, NormStyle

_EPS = 1e-5

AddRMSNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, NormStyle], tuple[torch.Tensor, torch.Tensor]]
"""Adds a residual to rows: `(rows, residual, weight, eps, style)`. Returns the sums, and the normalized sums."""

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SwiGLU = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class NormedRows:
    """Hidden states and residuals in bfloat16, and the weight of an RMS norm as in Llama.

    Attributes:
        num_bytes: bytes read and written by one call: two tensors in, two out.
    """

    def __init__(self, num_tokens: int, hidden_size: int, cache_bytes: int, device: torch.device) -> None:
        self._pairs = _draw_pairs(num_tokens, hidden_size, 4, cache_bytes, device)
        self.num_bytes = 4 * self._pairs[0, 0].nbytes
        self._weight = torch.randn(hidden_size, dtype=torch.bfloat16, device=device)

    def contestant(self, add_rms_norm: AddRMSNorm) -> Contestant:
        """Return the calls of a kernel that adds the residual and computes the norm, one per set of inputs."""
        calls = [partial(add_rms_norm, rows, residual, self._weight, _EPS, LLAMA) for rows, residual in self._pairs]
        rows, residual = self._pairs[0]
        expected = torch.stack(reference.add_rms_norm(rows, residual, self._weight, _EPS, LLAMA))
        return Contestant([*calls], lambda: worst_error(torch.stack(calls[0]()), expected))


class GatedRows:
    """Gates and the activations that they multiply, in bfloat16.

    Attributes:
        num_bytes: bytes read and written by one call: two tensors in, one out.
    """

    def __init__(self, num_tokens: int, intermediate_size: int, cache_bytes: int, device: torch.device) -> None:
        self._pairs = _draw_pairs(num_tokens, intermediate_size, 3, cache_bytes, device)
        self.num_bytes = 3 * self._pairs[0, 0].nbytes

    def contestant(self, swiglu: SwiGLU) -> Contestant:
        """Return the calls of a SwiGLU kernel, one per set of inputs."""
        calls = [partial(swiglu, gate, up) for gate, up in self._pairs]
        expected = reference.swiglu(*self._pairs[0])
        return Contestant([*calls], lambda: worst_error(calls[0](), expected))


class LinearRows:
    """Hidden states and the weights of linear layers in bfloat16.

    Attributes:
        flops: FLOPs of one call.
        num_bytes: bytes read and written by one call.
    """

    def __init__(
        self, num_tokens: int, in_features: int, out_features: int, cache_bytes: int, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.flops = 2.0 * num_tokens * in_features * out_features
        num_values = num_tokens * (in_features + out_features) + in_features * out_features
        self.num_bytes = num_values * torch.bfloat16.itemsize
        num_sets = num_input_sets(self.num_bytes, cache_bytes)
        self._rows = torch.randn(num_sets, num_tokens, in_features, dtype=torch.bfloat16, device=device)
        self._weights = torch.randn(num_sets, out_features, in_features, dtype=torch.bfloat16, device=device)

    def contestant(self, linear: Linear) -> Contestant:
        """Return the calls of a linear layer, one per set of inputs."""
        calls = [partial(linear, rows, weight) for rows, weight in zip(self._rows, self._weights, strict=True)]
        expected = functional.linear(self._rows[0].float(), self._weights[0].float())
        return Contestant([*calls], lambda: worst_error(calls[0](), expected))


def _draw_pairs(
    num_tokens: int, num_columns: int, num_tensors: int, cache_bytes: int, device: torch.device
) -> torch.Tensor:
    """Return random numbers, `[num_sets, 2, num_tokens, num_columns]`.

    Args:
        num_tokens, num_columns: shape of each tensor.
        num_tensors: number of tensors of this shape that one call reads or writes.
        cache_bytes: size of the cache.
        device: device of the result.
    """
    torch.manual_seed(0)
    num_bytes = num_tensors * num_tokens * num_columns * torch.bfloat16.itemsize
    num_sets = num_input_sets(num_bytes, cache_bytes)
    return torch.randn(num_sets, 2, num_tokens, num_columns, dtype=torch.bfloat16, device=device)
