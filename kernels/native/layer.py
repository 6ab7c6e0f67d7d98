"""Python interface of `layer.cpp`: consecutive decoder layers, with attention and gated MLP, in one call.

Calling each of the dozen parts of a layer from Python takes 0.1 to 0.3 ms more per layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.kernels.native.attention import Attention, Queries
from radixkv.kernels.native.gemm import Panels
from radixkv.kernels.native.library import DTYPE_CODES
from radixkv.kernels.native.rows import NativeNorm, address_of

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _NormStruct(ctypes.Structure):
    """`Norm` of layer.cpp. Without a weight there is no norm."""

    _fields_ = (("weight", _POINTER), ("dtype", _INT), ("rounds_first", _INT), ("eps", _DOUBLE))


class _WeightStruct(ctypes.Structure):
    """`Weight` of layer.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "bias")),
        *((name, _INT) for name in ("in_features", "out_features", "format")),
    )


class _LayerStruct(ctypes.Structure):
    """`Layer` of layer.cpp."""

    _fields_ = (
        *((name, _NormStruct) for name in ("first", "second", "query", "key")),
        *((name, _WeightStruct) for name in ("heads", "attended", "gate", "up", "down")),
        *((name, _INT) for name in ("num_query_heads", "num_kv_heads", "head_dim", "dtype")),
    )


class _KVViewStruct(ctypes.Structure):
    """`KVView` of layer.cpp."""

    _fields_ = tuple((name, _POINTER) for name in ("problem", "key", "value", "sinks", "slots", "largest"))


class KVView:
    """The K/V of layers that one step writes and reads.

    Args:
        attention: the attention of the step, for the queries of each layer.
        layers: indices of the layers in the pool.
        sinks: float32 `[num_query_heads]`, contiguous, or None.
        slots: int64 `[num_tokens]`, contiguous; see `reference.write_kv`.
        max_magnitudes: float32 `[num_tokens, num_kv_heads]`, contiguous; see `reference.write_kv`.

    Attributes:
        address: the address of an array with a `KVView` for each layer; valid as long as this object.
    """

    def __init__(
        self,
        attention: Attention,
        layers: Sequence[int],
        sinks: torch.Tensor | None,
        slots: torch.Tensor,
        max_magnitudes: torch.Tensor,
    ) -> None:
        step_addresses = (None if sinks is None else sinks.data_ptr(), slots.data_ptr(), max_magnitudes.data_ptr())
        self._views = (_KVViewStruct * len(layers))(
            *[_KVViewStruct(attention.problem, *attention.kv_addresses(layer), *step_addresses) for layer in layers]
        )
        self.address = ctypes.addressof(self._views)
        self._referenced = (attention, sinks, slots, max_magnitudes)  # keeps the memory of the pointers alive


@dataclass(frozen=True, slots=True)
class Weights:
    """A packed weight `[out_features, in_features]`, and its bias `[out_features]`."""

    panels: Panels
    bias: torch.Tensor | None

    def structure(self, in_features: int) -> _WeightStruct:
        """Return the structure that is passed to C++, for rows with `in_features` numbers."""
        bias = None if self.bias is None else self.bias.data_ptr()
        panels = self.panels
        return _WeightStruct(panels.numbers.data_ptr(), bias, in_features, panels.out_features, panels.format)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer, all of one dtype.

    Attributes:
        first, second: norms before attention, and before the MLP.
        heads: the projection to queries, keys and values.
        query, key: norms of each query head, and of each key head; None for none.
        attended: the output projection of attention.
        gate, up: projections of the MLP. If `up` is None, `gate` contains both.
        down: the output projection of the MLP.
        num_query_heads, num_kv_heads, head_dim: shape. `head_dim` is even.
    """

    first: NativeNorm
    second: NativeNorm
    heads: Weights
    query: NativeNorm | None
    key: NativeNorm | None
    attended: Weights
    gate: Weights
    up: Weights | None
    down: Weights
    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and rows."""
        return self.heads.panels.dtype


class NativeLayers:
    """Decoder layers in one call. For each: `h = rows + attention(first(rows))`, then `rows = h + mlp(second(h))`.

    The bits are those of separate calls of the parts. The bits of a row depend only on its prefix.

    Args:
        library: returned by `load_library`; the library that packed the weights.
        layers: the parts of each layer, in order; all with the same heads, hidden size and dtype.
    """

    def __init__(self, library: ctypes.CDLL, layers: Sequence[LayerParts]) -> None:
        self._call = library.radixkv_layers
        self._call.argtypes, self._call.restype = (*(_POINTER,) * 2, _INT, *(_POINTER,) * 4, _INT, _INT), None
        self._layers = layers  # keeps the memory of the pointers alive
        self._structures = (_LayerStruct * len(layers))(*map(_layer_struct, layers))

    def __len__(self) -> int:
        return len(self._layers)

    def queries(self, num_tokens: int) -> Queries:
        """Return the layout of the queries of each layer, for which its attention must be prepared."""
        parts = self._layers[0]
        width = (parts.num_query_heads + parts.num_kv_heads) * parts.head_dim
        return Queries(num_tokens, parts.num_query_heads, parts.head_dim, width, parts.head_dim, parts.dtype)

    def __call__(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, view: KVView) -> torch.Tensor:
        """Return the output of the last layer in a new tensor.

        Args:
            rows: `[..., num_tokens, hidden_size]`, contiguous.
            cos, sin: `[..., num_tokens, head_dim]` in the same dtype, contiguous.
            view: the K/V of these layers, prepared for `queries` of the same number of tokens.

        Raises:
            ValueError: rows, `cos` or `sin` have another dtype or shape, or are not contiguous.
        """
        parts, num_tokens = self._layers[0], rows.shape[-2]
        dtype, rotated_shape = parts.dtype, (*cos.shape[:-2], num_tokens, parts.head_dim)
        rows_address = address_of("rows", rows, dtype, (*rows.shape[:-1], len(parts.first.weight)))
        cos_address = address_of("cos", cos, dtype, rotated_shape)
        sin_address = address_of("sin", sin, dtype, rotated_shape)
        output = torch.empty_like(rows)
        self._call(
            ctypes.addressof(self._structures),
            view.address,
            len(self._layers),
            rows_address,
            cos_address,
            sin_address,
            output.data_ptr(),
            num_tokens,
            torch.get_num_threads(),
        )
        return output


def _layer_struct(parts: LayerParts) -> _LayerStruct:
    hidden_size = len(parts.first.weight)
    mlp_size = parts.gate.panels.out_features // (2 if parts.up is None else 1)
    attended_size = parts.num_query_heads * parts.head_dim
    return _LayerStruct(
        *map(_norm_struct, (parts.first, parts.second, parts.query, parts.key)),
        parts.heads.structure(hidden_size),
        parts.attended.structure(attended_size),
        parts.gate.structure(hidden_size),
        _WeightStruct() if parts.up is None else parts.up.structure(hidden_size),
        parts.down.structure(mlp_size),
        *(parts.num_query_heads, parts.num_kv_heads, parts.head_dim, DTYPE_CODES[parts.dtype]),
    )


def _norm_struct(norm: NativeNorm | None) -> _NormStruct:
    if norm is None:
        return _NormStruct()
    return _NormStruct(norm.weight.data_ptr(), DTYPE_CODES[norm.weight.dtype], int(norm.rounds_first), norm.eps)
