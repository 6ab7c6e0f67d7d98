"""Measures the Triton kernels and their peers: correctness, time, and share of the device's own rates.

python -m bench.kernels --sglang UNPACKED_WHEEL --json bench/results/kernels.json      # on a GPU
python -m bench.kernels --dry-run      # on any machine; its times are meaningless

Shapes are those of one layer of an 8B model. Each answer is first compared on the device with the reference in
`kernels/reference.py`, except for linear layers, whose reference is torch's in float32. Then the kernel and its peers
are timed over sets of inputs that together are larger than the device's cache. Times are medians of device events.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from bench.attention_peers import NAMES, peer
from bench.gpu.attention_variants import CHOICES, QUANTIZED, Permissions, first_case, variants
from bench.gpu.dry_run import interpreted
from bench.parts.attention_inputs import AttentionCase, Heads, capacity_of, expected_answer, make_inputs, worst_error
from bench.parts.device_time import DeviceRates, cache_bytes, measure_rates
from bench.parts.environment import describe_run
from bench.parts.kernel_inputs import (
    BlockCopies,
    GatedRows,
    LinearRows,
    NormedRows,
    SharedDecodes,
    SharedPrefix,
    TokenWrites,
)
from bench.parts.kernel_row import (
    HEADER,
    Contestant,
    KernelWork,
    Row,
    format_failures,
    format_peer,
    format_row,
    guarded_row,
    measure_row,
)
from bench.parts.result_file import write_json
from radixkv.kernels import reference
from radixkv.kernels.gpu.copy_blocks import copy_blocks
from radixkv.kernels.gpu.linear import linear
from radixkv.kernels.gpu.norm import add_rms_norm
from radixkv.kernels.gpu.swiglu import swiglu
from radixkv.kernels.gpu.write_kv import write_kv
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.triton_kernels import TritonKernels

KERNELS = ("write_kv", "copy_blocks", "add_rms_norm", "swiglu", "linear", "paged_attention", "shared_prefix")

# Maximum error of a vector of an attention output: bfloat16 rounds weights and outputs by 0.4 % each; a wrong K or V
# causes 100 %.
_TOLERANCE = 0.02

# Maximum error of a row of a norm, a gate or a linear layer: a few elements are rounded in the other direction, which
# changes each by 0.8 %.
_ROW_TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that are measured.

    Attributes:
        heads: attention heads of one layer.
        num_layers: layers of the blocks.
        written_tokens: tokens of each step that writes K and V.
        copied_blocks: blocks of each step that copies blocks.
        row_tokens: tokens of each step that computes RMS norms and gates.
        hidden_size: hidden size of the model.
        intermediate_size: intermediate size of an MLP.
        linear_tokens: tokens of each step that computes a linear layer.
        attentions: suffix and prefix tokens of each request.
        shared: requests that decode after a shared prefix.
        dequantized_suffix: minimum number of suffix tokens for which attention over blocks that are dequantized first
            is measured, too.
    """

    heads: Heads
    num_layers: int
    written_tokens: tuple[int, ...]
    copied_blocks: tuple[int, ...]
    row_tokens: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    linear_tokens: tuple[int, ...]
    attentions: tuple[tuple[int, int], ...]
    shared: tuple[SharedPrefix, ...]
    dequantized_suffix: int


GPU_SIZES = Sizes(
    Heads(num_query_heads=32, num_kv_heads=8, head_dim=128, block_size=64),
    num_layers=32,
    written_tokens=(64, 2048),
    copied_blocks=(1, 16),
    row_tokens=(16, 64, 2048),
    hidden_size=4096,
    intermediate_size=14_336,
    linear_tokens=(64, 2048),
    attentions=(
        *((64, 8192), (2048, 8192), (512, 8192), (64, 32_768), (2048, 32_768), (8192, 0), (16, 8192), (128, 8192)),
        *((16, 32_768), (128, 32_768), (16, 65_536), (64, 65_536), (128, 65_536)),
    ),
    shared=(SharedPrefix(16, 8192), SharedPrefix(64, 8192)),
    dequantized_suffix=512,
)
DRY_SIZES = Sizes(
    Heads(num_query_heads=4, num_kv_heads=2, head_dim=64, block_size=64),
    num_layers=1,
    written_tokens=(20,),
    copied_blocks=(2,),
    row_tokens=(20,),
    hidden_size=128,
    intermediate_size=384,
    linear_tokens=(20,),
    attentions=((20, 70),),
    shared=(SharedPrefix(3, 256),),
    dequantized_suffix=20,
)


class KernelBench:
    """Measures kernels on one device.

    Args:
        device: the device.
        sizes: sizes to measure.
        peers: names of the attention peers.
        sglang: folder of SGLang's unpacked wheel, or None.
        choice: which variants of attention are measured; see `attention_variants`.
    """

    def __init__(
        self, device: torch.device, sizes: Sizes, peers: Sequence[str], sglang: Path | None, choice: str
    ) -> None:
        self.rates: DeviceRates = measure_rates(device)
        self._device = device
        self._sizes = sizes
        self._peers = peers
        self._sglang = sglang
        self._choice = choice
        self._permissions = Permissions.on(device)

    def rows(self, kernels: Sequence[str]) -> Iterator[Row]:
        """Measure the kernels with these names. Yields each row again after each of its peers was measured."""
        sizes = self._sizes
        if "write_kv" in kernels:
            for kv_dtype, num_tokens in itertools.product((torch.bfloat16, *QUANTIZED), sizes.written_tokens):
                case = f"{num_tokens} tokens, {_dtype_name(kv_dtype)} pool"
                yield from guarded_row("write_kv", case, partial(self._measure_write, num_tokens, kv_dtype))
        if "copy_blocks" in kernels:
            for num_copies in sizes.copied_blocks:
                case = f"{num_copies} blocks of {sizes.num_layers} layers"
                yield from guarded_row("copy_blocks", case, partial(self._measure_copy, num_copies))
        for num_tokens, (kernel, measure) in itertools.product(
            sizes.row_tokens, (("add_rms_norm", self._measure_norm), ("swiglu", self._measure_gate))
        ):
            if kernel in kernels:
                yield from guarded_row(kernel, f"{num_tokens} tokens", partial(measure, num_tokens))
        if "linear" in kernels:
            yield from self._measure_linears()
        if "paged_attention" in kernels:
            for suffix_tokens, prefix_tokens in sizes.attentions:
                yield from self._measure_attentions(AttentionCase(suffix_tokens, prefix_tokens))
        if "shared_prefix" in kernels:
            for decodes in itertools.chain.from_iterable(
                each.modes(self._permissions.specialized_exact) for each in sizes.shared
            ):
                yield from guarded_row("shared_prefix", str(decodes), partial(self._measure_shared, decodes))

    def _measure_write(self, num_tokens: int, kv_dtype: torch.dtype) -> Iterator[Row]:
        writes = TokenWrites(num_tokens, kv_dtype, self._sizes.heads, cache_bytes(self._device), self._device)
        work = KernelWork(0, writes.num_bytes, writes.tolerance)
        peers = {"torch": partial(writes.contestant, reference.write_kv)}
        return measure_row(work, partial(writes.contestant, write_kv), peers, self.rates, self._device)

    def _measure_copy(self, num_copies: int) -> Iterator[Row]:
        sizes = self._sizes
        copies = BlockCopies(num_copies, sizes.num_layers, sizes.heads, cache_bytes(self._device), self._device)
        work = KernelWork(0, copies.num_bytes, 0)
        peers = {"torch": partial(copies.contestant, reference.copy_blocks)}
        return measure_row(work, partial(copies.contestant, copy_blocks), peers, self.rates, self._device)

    def _measure_norm(self, num_tokens: int) -> Iterator[Row]:
        rows = NormedRows(num_tokens, self._sizes.hidden_size, cache_bytes(self._device), self._device)
        work = KernelWork(0, rows.num_bytes, _ROW_TOLERANCE)
        peers = {"torch": partial(rows.contestant, reference.add_rms_norm)}
        return measure_row(work, partial(rows.contestant, add_rms_norm), peers, self.rates, self._device)

    def _measure_gate(self, num_tokens: int) -> Iterator[Row]:
        rows = GatedRows(num_tokens, self._sizes.intermediate_size, cache_bytes(self._device), self._device)
        work = KernelWork(0, rows.num_bytes, _ROW_TOLERANCE)
        peers = {"torch": partial(rows.contestant, reference.swiglu)}
        return measure_row(work, partial(rows.contestant, swiglu), peers, self.rates, self._device)

    def _measure_linears(self) -> Iterator[Row]:
        """Measure the linear layers of exact mode, and those of torch, for each shape of a layer's weights."""
        sizes = self._sizes
        hidden_size, kv_size = sizes.hidden_size, sizes.heads.num_kv_heads * sizes.heads.head_dim
        weights = {
            "query, output": (hidden_size, hidden_size),
            "key, value": (hidden_size, kv_size),
            "gate, up": (hidden_size, sizes.intermediate_size),
            "down": (sizes.intermediate_size, hidden_size),
        }
        for num_tokens, (name, shape) in itertools.product(sizes.linear_tokens, weights.items()):
            yield from guarded_row(
                "linear", f"{num_tokens} tokens, {name}", partial(self._measure_linear, num_tokens, *shape)
            )

    def _measure_linear(self, num_tokens: int, in_features: int, out_features: int) -> Iterator[Row]:
        rows = LinearRows(num_tokens, in_features, out_features, cache_bytes(self._device), self._device)
        work = KernelWork(rows.flops, rows.num_bytes, _ROW_TOLERANCE)
        peers = {"torch": partial(rows.contestant, functional.linear)}
        return measure_row(work, partial(rows.contestant, linear), peers, self.rates, self._device)

    def _measure_shared(self, decodes: SharedPrefix) -> Iterator[Row]:
        """Measure kernels that join the rows of requests over a shared prefix, and the same kernels without joining."""
        sizes = self._sizes
        inputs = SharedDecodes(decodes, sizes.heads, cache_bytes(self._device), self._device, sizes.num_layers)
        capacity = capacity_of(self._device, sizes.heads.head_dim)
        joined = partial(inputs.contestant, decodes.kernels(capacity, joins=True))
        not_joined = partial(inputs.contestant, decodes.kernels(capacity, joins=False))
        work = KernelWork(inputs.flops, inputs.num_bytes, _TOLERANCE)
        return measure_row(work, joined, {"ours, not joined": not_joined}, self.rates, self._device)

    def _measure_attentions(self, case: AttentionCase) -> Iterator[Row]:
        """Measure a row and its peers, then rows of its variants, each compared with our time in the first row."""
        case = first_case(case, self._choice, self._permissions)
        first_row: Row = {}
        measure = partial(self._measure_attention, case, self._peers)
        for first_row in guarded_row("paged_attention", _describe(case), measure):
            yield first_row
        for variant in variants(case, self._choice, self._permissions, self._sizes.dequantized_suffix):
            measure = partial(self._measure_attention, variant, ())  # without peers
            for row in guarded_row("paged_attention", _describe(variant), measure):
                if first_row["is_right"] and row["is_right"]:
                    our_result = {key: first_row[key] for key in ("is_right", "error", "ms", "host_ms")}
                    row["peers"]["ours in bf16"] = {**our_result, "ratio": first_row["ms"] / row["ms"]}
                yield row

    def _measure_attention(self, case: AttentionCase, peers: Sequence[str]) -> Iterator[Row]:
        sizes = self._sizes
        inputs = make_inputs(case, sizes.heads, cache_bytes(self._device), self._device, num_layers=sizes.num_layers)
        expected = expected_answer(inputs)
        kernels = TritonKernels(
            is_exact=case.is_exact,
            is_specialized=case.is_specialized,
            dequantizes_first="always" if case.is_dequantized_first else "never",
            capacity=capacity_of(self._device, sizes.heads.head_dim),
        )

        def attend(layer: int) -> torch.Tensor:
            return kernels.paged_attention(
                inputs.queries[layer], inputs.pool, layer, inputs.batch, Scoring(inputs.scale)
            )

        def our_contestant() -> Contestant:
            calls = [partial(attend, layer) for layer in range(len(inputs.queries))]
            return Contestant([*calls], lambda: worst_error(calls[0](), expected))

        def peer_contestant(name: str) -> Contestant:
            calls = peer(name, self._sglang)(inputs)
            return Contestant([*calls], lambda: worst_error(calls[0](), expected))

        work = KernelWork(case.flops(inputs.heads), inputs.num_bytes, _TOLERANCE)
        peer_contestants = {name: partial(peer_contestant, name) for name in peers}
        return measure_row(work, our_contestant, peer_contestants, self.rates, self._device)


def _describe(case: AttentionCase) -> str:
    block_order = "" if case.is_shuffled else ", blocks in order"
    pool = f"{_dtype_name(case.kv_dtype)}{', dequantized first' if case.is_dequantized_first else ''}"
    kernel = ", specialized" if case.is_specialized else ""
    mode = ", exact" if case.is_exact else ""
    return f"{case.suffix_tokens} after {case.prefix_tokens}, {pool}{block_order}{kernel}{mode}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print and write each result at once. Returns 1 if a kernel failed or is wrong."""
    options = _parse(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    sizes = DRY_SIZES if options.dry_run else GPU_SIZES
    sizes = replace(sizes, attentions=sizes.attentions[: options.attentions])
    rows: list[Row] = []
    with interpreted() if options.dry_run else contextlib.nullcontext():
        bench = KernelBench(device, sizes, options.peers, options.sglang, options.variants)
        result = {
            "is_dry_run": options.dry_run,
            "matrix_tflops": bench.rates.flops_per_s / 1e12,
            "copy_gb_per_s": bench.rates.bytes_per_s / 1e9,
            "cache_bytes": cache_bytes(device),
            **describe_run("bench.kernels", arguments),
            "rows": rows,
        }
        if options.dry_run:
            print("dry run: answers are checked, times are meaningless")
        print(f"this device: {result['matrix_tflops']:.4g} TFLOP/s, copies {result['copy_gb_per_s']:.4g} GB/s")
        print(HEADER)
        for row in bench.rows(options.kernels):
            _add_and_print(row, rows)
            if options.json:
                write_json(options.json, {**result, "is_finished": False})
    num_right = sum(row["is_right"] for row in rows)
    if options.json:
        write_json(options.json, {**result, "is_finished": True, "summary": _summary(rows)})
    print("\n".join([*format_failures(rows), f"{num_right} of {len(rows)} right"]))
    return 0 if num_right == len(rows) else 1


def _summary(rows: Sequence[Row]) -> str:
    """Return time and matrix rate of the first correct attention row in one line, for the table of `bench.gpu`."""
    first = next((row for row in rows if row["kernel"] == "paged_attention" and row["is_right"]), None)
    if first is None:
        return ""
    return f"{first['case']}: {first['ms']:.3f} ms, {first['matrix_share']:.0%} of the matrix rate"


def _add_and_print(row: Row, rows: list[Row]) -> None:
    """Add a new row to `rows` and print it; then print the peer of the row that was measured last, if any."""
    if not rows or rows[-1] is not row:
        rows.append(row)
        print(format_row(row), flush=True)
    if not row["peers"]:
        return
    last_peer = list(row["peers"])[-1]
    if line := format_peer(row, last_peer):
        print(line, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels and their peers.")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--peers", nargs="*", choices=NAMES, default=NAMES, help="attention peers; default all")
    parser.add_argument("--sglang", type=Path, help="folder of SGLang's unpacked wheel")
    parser.add_argument("--attentions", type=int, help="number of attention sizes, the first ones; default all")
    parser.add_argument("--variants", choices=CHOICES, default="all", help="which kernels and pools; default all")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on the CPU, through Triton's interpreter")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
