"""GEMM backends for linear layers on a CPU: several libraries, each with the weight packed in its own layout.

    native         packed for our own C++ kernels, where they are compiled
    packed         packed by MKL, in float32
    blocked        packed by oneDNN
    convolution    packed by oneDNN for 1x1 convolutions, whose pixels are the rows
    plain          the weight as it is: MKL in float32, oneDNN in half precision
    float32        float16 weights, converted once: machines without float16 arithmetic multiply them in float32
    int8           weights and rows quantized to 8 bits: results differ, so only if configured
    q8, q4         weights quantized to 8 or 4 bits, for our own C++ kernels: only if configured, or if the file of the
                   model contains quantized weights

MKL's packed GEMM adds up a row in the same order for every row count that was tried; its plain GEMM does not. A
convolution adds up the channels of a pixel in the same order for any number of pixels, so it is batch-invariant in
bfloat16 on CPUs with AMX, where oneDNN's matmul changes the order from 33 rows on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from radixkv.kernels.cpu.int8_linear import int8_linear, pack_int8
from radixkv.kernels.native import gemm
from radixkv.kernels.quantized_weight import QuantizedWeight

ALIGNMENT_BYTES = 64  # of rows: vector loads must not depend on where a row starts
_MKL: Any = torch.ops.mkl
_MKLDNN: Any = torch.ops.mkldnn

# The row counts that weights are packed for. oneDNN is as fast with other row counts. MKL is not: if packed for 16
# rows, 64 rows take 1.8 times as long; if packed for 512 rows, they take 0.85 times as long as if packed for 64, and
# few rows take the same time.
_HINTED_ROWS = 64
_HINTED_ROWS_OF_MKL = 512

# Padding, stride, dilation and groups of a 1x1 convolution.
_ONE_PIXEL = ([0, 0], [1, 1], [1, 1], 1)

Multiply = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
Gate = Callable[[torch.Tensor, Any, torch.Tensor | None, Any, torch.Tensor | None], torch.Tensor]


class GemmBackend(NamedTuple):
    """An implementation of `torch.nn.functional.linear`.

    Attributes:
        pack: packs weights `[features, in_features]`, concatenated by features, in an opaque format for `multiply`.
            The backends in `QUANTIZED_BITS` also take a `QuantizedWeight` with this number of bits.
        multiply: takes contiguous rows `[num_rows, in_features]`, the packed weight, and a bias `[out_features]` or
            None. Returns `[num_rows, out_features]` in the rows' dtype.
        dtypes: dtypes of weights that it supports.
        gate: fused SwiGLU. Takes rows, the packed weight and bias of the gate, and those of up. Returns
            `silu(gate) * up`, rounded once, or after each of the two matmuls. None if the library has no such function.
        is_batch_invariant: whether its code is batch-invariant by construction, so that no row count has to be checked.
    """

    pack: Callable[..., Any]
    multiply: Multiply
    dtypes: tuple[torch.dtype, ...]
    gate: Gate | None = None
    is_batch_invariant: bool = False


def gemm_backends(weight: torch.Tensor) -> tuple[str, ...]:
    """Return the backends for a weight like this one on this machine, except int8, q8 and q4."""
    dtype = weight.dtype
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    excluded = {"int8", *QUANTIZED_BITS}
    if not has_mkl:
        excluded.add("packed")
    if not gemm.multiplies(weight):
        excluded.add("native")
    for name, onednn_dtype in _ONEDNN_DTYPES.items():
        if not _onednn_computes(onednn_dtype or dtype):
            excluded.add(name)
    return tuple(name for name, backend in GEMM_BACKENDS.items() if dtype in backend.dtypes and name not in excluded)


def aligned_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as a contiguous matrix `[num_rows, in_features]` that is aligned to `ALIGNMENT_BYTES`.

    >>> aligned_rows(torch.zeros(2, 3, 5)).shape
    torch.Size([6, 5])
    """
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    return flat if flat.data_ptr() % ALIGNMENT_BYTES == 0 else flat.clone()


def _onednn_computes(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(_MKLDNN._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(_MKLDNN._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _plain_matmul(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())


def _concatenating(pack: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """Return a function that concatenates weights and then packs them."""
    return lambda *weights: pack(weights[0] if len(weights) == 1 else torch.cat(weights))


def _quantized_packer(bits: int) -> Callable[..., gemm.QuantizedPanels]:
    """Return a function that quantizes each weight, unless it is quantized, and then packs the weights."""

    def quantized(weight: torch.Tensor | QuantizedWeight) -> QuantizedWeight:
        return weight if isinstance(weight, QuantizedWeight) else QuantizedWeight.quantize(weight, bits)

    return lambda *weights: gemm.QuantizedPanels(map(quantized, weights), weights[0].dtype)


def _aligned_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.data_ptr() % ALIGNMENT_BYTES == 0 else weight.clone()


def _pack_for_mkl(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed: torch.Tensor = _MKL._mkl_reorder_linear_weight(weight.contiguous(), _HINTED_ROWS_OF_MKL)
    return packed, weight.new_empty(1).expand(weight.shape)  # the matmul only reads the shape of the weight


def _mkl_matmul(
    rows: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    # Given another row count, MKL would use the original weight, which we do not keep.
    output: torch.Tensor = _MKL._mkl_linear(rows, *packed, bias, rows.shape[0])
    return output


def _pack_for_onednn(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = _MKLDNN._reorder_linear_weight(weight.contiguous())
    return packed


def _onednn_matmul(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = _MKLDNN._linear_pointwise(rows, packed, bias, "none", [], "")
    return output


def _onednn_gate(
    rows: torch.Tensor,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
) -> torch.Tensor:
    gates = _MKLDNN._linear_pointwise(rows, gate, gate_bias, "swish", [], "")
    gated: torch.Tensor = _MKLDNN._linear_pointwise.binary(rows, gates, up, up_bias, "mul")
    return gated


def _pack_convolution(weight: torch.Tensor) -> torch.Tensor:
    kernel = weight.contiguous()[:, :, None, None]
    size = [1, weight.shape[1], 1, _HINTED_ROWS]
    packed: torch.Tensor = _MKLDNN._reorder_convolution_weight(kernel, *_ONE_PIXEL, size)
    return packed


def _convolution_matmul(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output = _MKLDNN._convolution_pointwise(_as_pixels(rows), packed, bias, *_ONE_PIXEL, "none", [], "")
    return _as_rows(output)


def _convolution_gate(
    rows: torch.Tensor,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
) -> torch.Tensor:
    pixels = _as_pixels(rows)
    gates = _MKLDNN._convolution_pointwise(pixels, gate, gate_bias, *_ONE_PIXEL, "swish", [], "")
    gated = _MKLDNN._convolution_pointwise.binary(pixels, gates, up, up_bias, *_ONE_PIXEL, "mul", None, None, [], None)
    return _as_rows(gated)


def _as_pixels(rows: torch.Tensor) -> torch.Tensor:
    """View rows `[num_rows, width]` as an image of height 1: `[1, width, 1, num_rows]`, channels last."""
    num_rows, width = rows.shape
    return rows.as_strided((1, width, 1, num_rows), (num_rows * width, 1, num_rows * width, width))


def _as_rows(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.permute(0, 2, 3, 1).reshape(pixels.shape[3], -1)


def _pack_float32(weight: torch.Tensor) -> torch.Tensor:
    return _pack_for_onednn(weight.float())


def _float32_matmul(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _onednn_matmul(rows.float(), packed, None if bias is None else bias.float()).to(rows.dtype)


# Backends of oneDNN, with the dtype that each computes in; None for the dtype of the weight.
_ONEDNN_DTYPES: dict[str, torch.dtype | None] = {"blocked": None, "convolution": None, "float32": torch.float32}

# Backends whose weights are quantized and whose rows are not, with the bits of a code.
QUANTIZED_BITS = {"q8": 8, "q4": 4}

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Likely fast backends come first, so that slower ones are dropped early.
GEMM_BACKENDS = {
    "native": GemmBackend(gemm.Panels, gemm.multiply, gemm.DTYPES, gemm.gate, is_batch_invariant=True),
    "blocked": GemmBackend(_concatenating(_pack_for_onednn), _onednn_matmul, _FLOATS, _onednn_gate),
    "packed": GemmBackend(_concatenating(_pack_for_mkl), _mkl_matmul, (torch.float32,)),
    "convolution": GemmBackend(
        _concatenating(_pack_convolution), _convolution_matmul, (torch.bfloat16,), _convolution_gate
    ),
    "plain": GemmBackend(_concatenating(_aligned_weight), _plain_matmul, _FLOATS),
    "float32": GemmBackend(_concatenating(_pack_float32), _float32_matmul, (torch.float16,)),
    "int8": GemmBackend(_concatenating(pack_int8), int8_linear, _FLOATS),
    **{
        name: GemmBackend(_quantized_packer(bits), gemm.multiply, gemm.DTYPES, gemm.gate, is_batch_invariant=True)
        for name, bits in QUANTIZED_BITS.items()
    },
}
