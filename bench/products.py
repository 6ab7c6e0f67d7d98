"""Times the GEMM of a linear layer with each library that radixkv can use on a CPU, including its own C++ kernels.

The formats of `model.weights` that the processor supports, q8, q4 and int8, are timed next to the libraries.

python -m bench.products [--shapes 896x4864,4864x896] [--rows 1,8,16,64,512] [--dtypes float32 bfloat16] [--json FILE]

A shape is written INxOUT, in input and output features. Libraries are measured in turn. Each one reads copies of the
weight, at most 32, that together have twice the size of the last-level cache, since models read weights from memory.
Times are medians, of CPU time with one thread and otherwise of wall time. Each result is compared with float64 before
it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.parts.result_file import write_result
from radixkv.kernels.cpu.gemm_backends import QUANTIZED_BITS, gemm_backends
from radixkv.kernels.cpu.gemm_trial import cold_copies
from radixkv.kernels.cpu.int8_linear import adds_integers_exactly
from radixkv.kernels.native import gemm
from radixkv.kernels.quantized_weight import QuantizedWeight
from radixkv.model.on_cpu import native_library

_OURS = "native"

# Maximum error relative to the sum of the magnitudes of a result's terms: the rounding of the result and of the sums.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
_INT8_TOLERANCE = 2**-4  # rows are quantized too

Multiply = Callable[[torch.Tensor], torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a line for each number of rows, and write the result."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    native_library()  # loads our kernels
    rows: list[dict[str, Any]] = []
    for name, (in_features, out_features) in itertools.product(options.dtypes, options.shapes):
        weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0))
        rows += measure(weight.to(getattr(torch, name)), options.rows, options.rounds)
    result = {"rows": rows, "threads": options.threads, "rounds": options.rounds}
    write_result(options.json, "bench.products", arguments, result)


@torch.inference_mode()
def measure(weight: torch.Tensor, row_counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Time the GEMM with a weight for several numbers of rows, by library and format.

    Args:
        weight: `[out_features, in_features]`.
        row_counts: numbers of rows of the input.
        rounds: calls of each library with each number of rows.

    Returns:
        A result for each number of rows: microseconds of each library and format; the ratio of ours to the fastest
        other library, None if ours does not support the weight; and the ratio of each format to the fastest library.
    """
    libraries, formats = gemm_backends(weight), _supported_formats(weight)
    copies = {name: cold_copies(name, weight, None) for name in (*libraries, *formats)}
    dtype = str(weight.dtype).removeprefix("torch.")
    results = []
    for num_rows in row_counts:
        rows = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight.dtype)
        for name, calls in copies.items():
            _check(name, calls[0](rows), rows, weight)
        times_us = {name: statistics.median(each) for name, each in _time_calls_us(copies, rows, rounds).items()}
        other_times_us = [times_us[name] for name in libraries if name != _OURS]
        ratio = times_us[_OURS] / min(other_times_us) if _OURS in times_us else None
        fastest_us = min(times_us[name] for name in libraries)
        ratios = {name: times_us[name] / fastest_us for name in formats}
        case = {"dtype": dtype, "in_features": weight.shape[1], "out_features": weight.shape[0], "rows": num_rows}
        results.append({**case, "us": times_us, "ratio": ratio, "format_ratios": ratios})
        times = "  ".join(f"{name} {each:.0f}" for name, each in times_us.items())
        shown_ratio = "-" if ratio is None else f"{ratio:.2f}"
        print(
            f"{dtype:8} {weight.shape[1]:6} x {weight.shape[0]:<6} {num_rows:4} rows, us: {times}  ratio {shown_ratio}"
        )
    return results


def _supported_formats(weight: torch.Tensor) -> list[str]:
    """Return the quantized formats for which this machine has a GEMM with a weight of this shape and dtype."""
    quantized = QUANTIZED_BITS if gemm.multiplies_quantized(weight) else ()
    return [*quantized, *(["int8"] if adds_integers_exactly() else [])]


def _time_calls_us(copies: dict[str, list[Multiply]], rows: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    turns = {name: itertools.cycle(calls) for name, calls in copies.items()}
    times_us: dict[str, list[float]] = {name: [] for name in copies}
    for number in range(-1, rounds):
        for name in turns:
            call = next(turns[name])
            start_s = clock()
            call(rows)
            if number >= 0:  # the first round warms up
                times_us[name].append(1e6 * (clock() - start_s))
    return times_us


def _check(name: str, product: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    if name in QUANTIZED_BITS:
        weight = QuantizedWeight.quantize(weight, QUANTIZED_BITS[name]).dequantize()
    rows_f64, weight_f64 = rows.double(), weight.double().t()
    tolerance = _INT8_TOLERANCE if name == "int8" else _TOLERANCE[rows.dtype]
    bound = tolerance * (rows_f64.abs() @ weight_f64.abs())
    assert bool(((product.double() - rows_f64 @ weight_f64).abs() <= bound).all()), (
        f"{name}: the result differs from that in float64"
    )


def _parse_shapes(text: str) -> list[tuple[int, int]]:
    return [
        (int(in_features), int(out_features))
        for in_features, out_features in (each.split("x") for each in text.split(","))
    ]


def _parse_numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the GEMM of a linear layer, by library.")
    shapes = "896x1152,896x4864,4864x896"
    parser.add_argument(
        "--shapes", type=_parse_shapes, default=_parse_shapes(shapes), help=f"features in x out; default {shapes}"
    )
    parser.add_argument("--rows", type=_parse_numbers, default=[1, 8, 16, 64, 512], help="default 1,8,16,64,512")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
