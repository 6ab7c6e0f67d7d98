"""Python interface of `rows.cpp`: operations between matmuls. The bits of a row do not depend on other rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.library import DTYPE_CODES
from radixkv.kernels.norm_style import NormStyle

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

_ARGUMENT_TYPES = {
    "radixkv_norm": (*(_POINTER,) * 3, *(_INT,) * 5, _DOUBLE, _INT, _INT),
    "radixkv_rotate": (*(_POINTER,) * 4, *(_INT,) * 6),
    "radixkv_gate": (*(_POINTER,) * 2, *(_INT,) * 4),
    "radixkv_write": (*(_POINTER,) * 6, *(_INT,) * 10),
}


class NativeRows:
    """Operations between the matmuls of a model, for float32, bfloat16 and float16 tensors on a CPU.

    Args:
        library: returned by `load_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, types in _ARGUMENT_TYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
        self._norm = library.radixkv_norm
        self._rotate = library.radixkv_rotate
        self._gate = library.radixkv_gate
        self._write = library.radixkv_write

    def norm(self, weight: torch.Tensor, eps: float, style: NormStyle) -> NativeNorm:
        """Return an RMS norm; see `row_norm`.

        Args:
            weight: float32 `[num_columns]` with the style's offset added, or in the rows' dtype if the style rounds
                first.
            eps: added to the mean of squares.
            style: how the weight is applied.
        """
        return NativeNorm(self._norm, weight.contiguous(), eps, rounds_first=style.rounds_first)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply rotary embeddings: `heads * cos + (-second half, first half) * sin`, each product rounded.

        Args:
            heads: `[num_tokens, num_heads, head_dim]`; the heads of a token are adjacent. `head_dim` is even.
            cos, sin: `[num_tokens, head_dim]` in the same dtype, contiguous.

        Returns:
            A new contiguous tensor like `heads`.

        Raises:
            ValueError: `cos` or `sin` has another dtype or shape or is not contiguous, or heads are not adjacent.
        """
        _require_adjacent_heads("heads", heads)
        num_tokens, num_heads, head_dim = heads.shape
        cos_address = address_of("cos", cos, heads.dtype, (num_tokens, head_dim))
        sin_address = address_of("sin", sin, heads.dtype, (num_tokens, head_dim))
        rotated = heads.new_empty(heads.shape)
        self._rotate(
            *(heads.data_ptr(), cos_address, sin_address, rotated.data_ptr(), num_tokens, num_heads, head_dim),
            *(heads.stride(0), DTYPE_CODES[heads.dtype], torch.get_num_threads()),
        )
        return rotated

    def gate(self, rows: torch.Tensor) -> torch.Tensor:
        """Return SiLU of the first half of rows `[..., 2 * width]`, rounded, times the second half."""
        rows = rows.contiguous()
        width = rows.shape[-1] // 2
        gated = rows.new_empty(*rows.shape[:-1], width)
        num_rows = rows.numel() // max(1, 2 * width)
        self._gate(rows.data_ptr(), gated.data_ptr(), num_rows, width, DTYPE_CODES[rows.dtype], torch.get_num_threads())
        return gated

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        slots: torch.Tensor,
        pool: KVPool,
        layer: int,
        max_magnitudes: torch.Tensor | None = None,
    ) -> None:
        """Compute `reference.write_kv` for a pool that is not quantized.

        The heads of a token must be adjacent in `key` and in `value`; `slots` and `max_magnitudes` must be contiguous.

        Raises:
            ValueError: an argument does not meet these conditions, or `value`, `slots` or `max_magnitudes` has another
                dtype or shape.
        """
        _require_adjacent_heads("key", key)
        if value is not None:
            _require_adjacent_heads("value", value)
            if (value.dtype, value.shape) != (key.dtype, key.shape):
                expected, got = (f"shape {tuple(tensor.shape)} in {tensor.dtype}" for tensor in (key, value))
                raise ValueError(f"value: expected {expected}, got {got}")
        slots_address = address_of("slots", slots, torch.int64, key.shape[:1])
        magnitudes_address = None
        if max_magnitudes is not None:
            magnitudes_address = address_of("max_magnitudes", max_magnitudes, torch.float32, key.shape[:2])
        values = pool.values
        keys_address = values.data_ptr() + layer * values.stride(1) * values.element_size()
        values_address = keys_address + values.stride(2) * values.element_size()
        self._write(
            *(key.data_ptr(), None if value is None else value.data_ptr(), slots_address),
            *(keys_address, values_address, magnitudes_address),
            *(*key.shape, pool.block_size, key.stride(0), 0 if value is None else value.stride(0)),
            *(values.stride(3), values.stride(0), DTYPE_CODES[key.dtype], DTYPE_CODES[pool.dtype]),
        )


class NativeNorm:
    """An RMS norm; see `NativeRows.norm`.

    Attributes:
        weight: `[num_columns]`, contiguous.
        eps: added to the mean of squares.
        rounds_first: whether rows are rounded to their dtype before the weight is applied.
    """

    def __init__(self, norm: Callable[..., None], weight: torch.Tensor, eps: float, *, rounds_first: bool) -> None:
        self._norm = norm
        self.weight = weight
        self.eps = eps
        self.rounds_first = rounds_first

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the normalized rows `[..., num_columns]` in a new tensor."""
        num_columns = len(self.weight)
        flat = rows.reshape(-1, num_columns)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        output = rows.new_empty(rows.shape)
        self._norm(
            *(flat.data_ptr(), self.weight.data_ptr(), output.data_ptr(), flat.shape[0], num_columns, flat.stride(0)),
            *(
                DTYPE_CODES[rows.dtype],
                DTYPE_CODES[self.weight.dtype],
                self.eps,
                int(self.rounds_first),
                torch.get_num_threads(),
            ),
        )
        return output


def has_adjacent_heads(heads: torch.Tensor) -> bool:
    """Return whether the heads of a token, in `[num_tokens, num_heads, head_dim]`, are adjacent without gaps."""
    return heads.stride(2) == 1 and (heads.shape[1] == 1 or heads.stride(1) == heads.shape[2])


def _require_adjacent_heads(name: str, heads: torch.Tensor) -> None:
    if not has_adjacent_heads(heads):
        raise ValueError(f"{name}: expected adjacent heads without gaps, got strides {heads.stride()}")


def address_of(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the address of a tensor's data for C++, which does not check dtypes and shapes.

    Args:
        name: name of the argument, for the error message.
        tensor: a tensor on the CPU.
        dtype, shape: the dtype and shape that the C++ code expects.

    Raises:
        ValueError: the tensor has another dtype or shape, or is not contiguous.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        order = "contiguous" if tensor.is_contiguous() else "strided"
        raise ValueError(
            f"{name}: expected a contiguous tensor of shape {tuple(shape)} in {dtype}, "
            f"got a {order} one of shape {tuple(tensor.shape)} in {tensor.dtype}"
        )
    return tensor.data_ptr()
