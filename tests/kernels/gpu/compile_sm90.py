"""Compiles kernels for sm_90 without a GPU, exactly as callers launch them, and inspects the machine code.

Run as `python tests/kernels/gpu/compile_sm90.py [--all]` with TRITON_INTERPRET unset. Prints one JSON object per line.
Each case calls a kernel's public function on small CPU tensors; launches compile and stop there. So the tile shapes,
warps, stages and argument specializations are those of a real call.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from radixkv.kernels import norm_style
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention import paged_attention
from radixkv.kernels.gpu.attention_plan import plan_attention
from radixkv.kernels.gpu.copy_blocks import copy_blocks
from radixkv.kernels.gpu.dequantize_blocks import dequantize_blocks
from radixkv.kernels.gpu.hadamard import hadamard_transform
from radixkv.kernels.gpu.linear import linear
from radixkv.kernels.gpu.low_rank import RANKS, LowRankStep, add_low_rank
from radixkv.kernels.gpu.norm import add_rms_norm, rms_norm, row_mean
from radixkv.kernels.gpu.swiglu import swiglu
from radixkv.kernels.gpu.write_kv import write_kv
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.norm_style import NormStyle
from radixkv.kernels.scoring import Scoring

_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
_INSTRUCTIONS = ("HGMMA", "HMMA", "FFMA", "UTMALDG", "USETMAXREG", "LDGSTS", "LDG.E.128", "STG.E.128", "LDL", "STL")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
_INSTRUCTION_BYTES = 16


@dataclass(frozen=True, slots=True)
class CompiledCase:
    """The assembler's output for one launch. `loop_instructions` is their number in its longest innermost loop."""

    case: str
    kernel: str
    triton: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    code_sha256: str
    instructions: dict[str, int]
    loop_instructions: int


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One shape of the attention kernel."""

    dtype: torch.dtype
    head_dim: int
    tile_rows: int
    block_size: int = 64
    group_size: int = 4
    window: int | None = None
    softcap: float | None = None
    split: bool = False
    kv_dtype: torch.dtype | None = None
    num_tokens: int = 40
    is_specialized: bool = False
    is_shared: bool = False
    has_sinks: bool = False

    def __str__(self) -> str:
        name = f"{str(self.dtype)[6:]} D{self.head_dim} rows{self.tile_rows} block{self.block_size} G{self.group_size}"
        extras = [name for name in ("window", "softcap", "split") if getattr(self, name)]
        extras += [f"pool {str(self.kv_dtype)[6:]}"] if self.kv_dtype else []
        extras += ["sinks"] * self.has_sinks + ["specialized"] * self.is_specialized
        return " ".join([name, *extras]) + f", rows of {self.num_tokens} tokens{' joined' * self.is_shared}"

    def launch(self) -> None:
        """Call the kernel on tensors of this shape."""
        num_kv_heads, num_requests = 2, 1 + self.is_shared
        num_tokens, kv_len = num_requests * self.num_tokens, 512 + self.num_tokens
        tables = num_requests * [np.arange(-(-kv_len // self.block_size), dtype=np.int32)]
        lens = num_requests * [self.num_tokens], num_requests * [kv_len]
        batch = PagedBatch.build(*lens, tables, self.block_size)
        shape = (1, 2, num_kv_heads, self.block_size, self.head_dim)
        pool = KVPool.allocate(*shape, dtype=self.kv_dtype or self.dtype)
        # Heads first in memory, as transformers has them, so that a stride depends on the number of tokens.
        query = torch.empty(num_kv_heads * self.group_size, num_tokens, self.head_dim, dtype=self.dtype).transpose(0, 1)
        plan = plan_attention(
            batch,
            num_query_heads=query.shape[1],
            num_kv_heads=num_kv_heads,
            dtype=self.dtype,
            window=self.window,
            tile_rows=self.tile_rows,
            split_tokens=256 if self.split or self.is_shared else 4096,
        )
        assert bool(len(plan.joined_rows)) == self.is_shared
        sinks = torch.empty(query.shape[1], dtype=self.dtype) if self.has_sinks else None
        scoring = Scoring(0.1, self.window, self.softcap, sinks)
        paged_attention(query, pool, 0, batch, plan, scoring, is_specialized=self.is_specialized)


bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
fp8, int8, int4 = torch.float8_e4m3fn, torch.int8, torch.int4

# Tested with every change: each code path once, on the shapes of common models.
ATTENTION_CASES = [
    AttentionCase(bf16, 128, 128, split=True),
    AttentionCase(bf16, 128, 128),
    AttentionCase(bf16, 128, 64),
    AttentionCase(bf16, 128, 16, split=True),
    AttentionCase(bf16, 128, 128, block_size=16),
    AttentionCase(bf16, 128, 128, window=4096, softcap=50.0),
    AttentionCase(bf16, 64, 128, group_size=7),
    AttentionCase(bf16, 80, 128, group_size=1),
    AttentionCase(bf16, 256, 128, softcap=50.0, group_size=2),
    AttentionCase(bf16, 256, 64),
    AttentionCase(fp16, 128, 128),
    AttentionCase(fp32, 128, 16),
    AttentionCase(bf16, 128, 128, kv_dtype=fp8),
    AttentionCase(bf16, 128, 64, kv_dtype=int8, split=True),
    AttentionCase(bf16, 128, 128, kv_dtype=int8),
    AttentionCase(bf16, 128, 16, kv_dtype=int4),
    AttentionCase(bf16, 128, 128, kv_dtype=int4, window=4096, softcap=50.0),
    AttentionCase(bf16, 80, 128, kv_dtype=int4, group_size=1),
    AttentionCase(bf16, 256, 128, kv_dtype=int4, group_size=2),
    AttentionCase(fp16, 128, 128, kv_dtype=fp8),
    AttentionCase(fp32, 128, 16, kv_dtype=bf16),
    AttentionCase(fp32, 128, 16, kv_dtype=int4),
    AttentionCase(bf16, 64, 128, group_size=8, window=128, has_sinks=True),
    AttentionCase(bf16, 64, 16, group_size=8, split=True, has_sinks=True),
    AttentionCase(bf16, 64, 128, group_size=8, kv_dtype=int8, has_sinks=True),
    AttentionCase(fp32, 64, 16, group_size=8, has_sinks=True),
    # The first shapes again, for other numbers of tokens.
    AttentionCase(bf16, 128, 128, num_tokens=1),
    AttentionCase(bf16, 128, 128, num_tokens=17),
    AttentionCase(bf16, 128, 128, num_tokens=48),
    AttentionCase(bf16, 128, 128, num_tokens=3, is_shared=True),
]

# The warp-specialized kernel: everything that it supports, and one shape again for other numbers of tokens.
SPECIALIZED_CASES = [
    AttentionCase(bf16, 128, 128, is_specialized=True),
    AttentionCase(bf16, 128, 128, window=4096, softcap=50.0, group_size=2, is_specialized=True),
    AttentionCase(bf16, 64, 128, window=4096, group_size=7, is_specialized=True),
    AttentionCase(fp16, 80, 128, group_size=1, block_size=128, softcap=50.0, is_specialized=True),
    AttentionCase(bf16, 64, 128, group_size=8, window=128, has_sinks=True, is_specialized=True),
    AttentionCase(bf16, 128, 128, split=True, has_sinks=True, is_specialized=True),
    *(AttentionCase(bf16, 128, 128, num_tokens=num_tokens, is_specialized=True) for num_tokens in (1, 48)),
    AttentionCase(bf16, 128, 128, num_tokens=3, is_shared=True, is_specialized=True),
]

ALL_SPECIALIZED_CASES = [
    AttentionCase(dtype, head_dim, 128, window=window, softcap=softcap, group_size=group_size, is_specialized=True)
    for dtype in (bf16, fp16)
    for head_dim in (40, 64, 96, 128)
    for group_size in (1, 7)
    for window, softcap in ((None, None), (4096, None), (None, 50.0), (4096, 50.0))
]

ALL_ATTENTION_CASES = [
    AttentionCase(dtype, head_dim, tile_rows, block_size, window=window, softcap=softcap, kv_dtype=kv_dtype)
    for kv_dtype in (None, fp8, int8, int4)
    for dtype, all_tile_rows in ((bf16, (16, 64, 128)), (fp32, (16,)))
    for head_dim in (32, 64, 80, 96, 128, 256)
    for tile_rows in all_tile_rows
    for block_size in (16, 32, 64)
    for window, softcap in ((None, None), (4096, None), (4096, 50.0))
]


@dataclass(frozen=True, slots=True)
class LinearCase:
    """One shape of the matmul; `loads` is the expected way of loading tiles, "TMA" or "pointers"."""

    dtype: torch.dtype
    out_features: int
    in_features: int
    loads: str
    is_transposed: bool = False
    num_rows: int = 300
    first_row: int = 0

    def __str__(self) -> str:
        name = f"{str(self.dtype)[6:]} {self.out_features}x{self.in_features} by {self.loads}"
        name += " transposed" if self.is_transposed else ""
        return f"{name}, rows {self.first_row} to {self.num_rows}"

    def launch(self) -> None:
        """Call the kernel on tensors of this shape."""
        weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype)
        if self.is_transposed:
            weight = torch.empty(self.in_features, self.out_features, dtype=self.dtype).t()
        rows = torch.empty(self.num_rows, self.in_features, dtype=self.dtype)[self.first_row :]
        linear(rows, weight, torch.empty(self.out_features, dtype=self.dtype))


# Every tile shape with every way of loading. With odd numbers of features, the kernel computes the most addresses.
LINEAR_CASES = [
    *(
        LinearCase(bf16, out_features, 4096, "TMA", is_transposed)
        for out_features in (16384, 8192, 4096, 1024)
        for is_transposed in (False, True)
    ),
    LinearCase(fp16, 8192, 64, "TMA"),
    *(LinearCase(bf16, out_features, 100, "pointers") for out_features in (8192, 1000)),
    *(LinearCase(fp16, out_features, 4097, "pointers") for out_features in (8192, 1000)),
    LinearCase(bf16, 2049, 4096, "pointers", is_transposed=True),
    LinearCase(fp32, 4096, 4096, "pointers"),
    LinearCase(fp32, 4096, 4096, "pointers", is_transposed=True),
    LinearCase(fp32, 100, 37, "pointers"),
    # The same weights again, for other numbers of rows.
    *(LinearCase(bf16, 1024, 4096, "TMA", num_rows=num_rows) for num_rows in (1, 16, 17)),
    *(LinearCase(bf16, 1000, 100, "pointers", num_rows=n, first_row=first) for n, first in ((1, 0), (16, 0), (18, 1))),
]


# (dtype, num_columns, first_row): rows of one block of columns, of one warp, of several blocks, and of an odd number of
# columns, also as a view whose start is not aligned.
NORM_CASES = [(bf16, 4096, 0), (fp32, 128, 0), (bf16, 14336, 0), (bf16, 37, 0), (bf16, 37, 1)]

# (kv_dtype, dtype, head_dim, block_size)
DEQUANTIZE_CASES = [
    *((kv_dtype, bf16, head_dim, 64) for kv_dtype in (fp8, int8, int4) for head_dim in (64, 80, 128, 256)),
    *((kv_dtype, fp16, 128, 16) for kv_dtype in (fp8, int8, int4)),
]


def _launch_norms(dtype: torch.dtype, num_columns: int, first_row: int) -> None:
    rows = torch.empty(16, num_columns, dtype=dtype)[first_row:]
    row_mean(rows)
    rms_norm(rows, torch.empty(num_columns, dtype=dtype), 1e-6)


# (dtype, num_columns, style, has_residual): the sizes of hidden states and of heads, and an odd size.
FUSED_NORM_CASES = [
    (bf16, 4096, "TORCH", True),
    (bf16, 4096, "LLAMA", True),
    (bf16, 4096, "GEMMA", True),
    (bf16, 4096, "LLAMA", False),
    (bf16, 4096, "GEMMA", False),
    (bf16, 128, "LLAMA", False),
    (bf16, 256, "GEMMA", False),
    (bf16, 37, "LLAMA", True),
    (fp16, 5120, "LLAMA", True),
    (fp32, 4096, "GEMMA", True),
]


def _launch_fused_norm(dtype: torch.dtype, num_columns: int, style: NormStyle, has_residual: bool) -> None:
    rows, weight = torch.empty(16, num_columns, dtype=dtype), torch.empty(num_columns, dtype=dtype)
    if has_residual:
        add_rms_norm(rows, rows, weight, 1e-6, style)
    else:
        rms_norm(rows, weight, 1e-6, style)


# (dtype, num_columns, num_rows): one shape with several numbers of rows, and other shapes.
SWIGLU_CASES = [
    (bf16, 14336, 16),
    (bf16, 14336, 1),
    (bf16, 14336, 17),
    (fp16, 9728, 16),
    (fp32, 4096, 16),
    (bf16, 37, 16),
]


def _launch_swiglu(dtype: torch.dtype, num_columns: int, num_rows: int) -> None:
    gate, up = torch.empty(2, num_rows, num_columns, dtype=dtype)
    swiglu(gate, up)


# (dtype, out_features, in_features, rank, num_rows, num_adapters): every rank, odd shapes, and other numbers of rows.
LOW_RANK_CASES = [
    *((bf16, 4096, 4096, rank, 40, 2) for rank in RANKS),
    (fp16, 14336, 4096, 16, 40, 2),
    (bf16, 1000, 100, 16, 40, 2),
    (bf16, 37, 33, 64, 40, 2),
    *((fp32, 4096, 4096, rank, 40, 2) for rank in RANKS[::3]),
    (bf16, 4096, 4096, 16, 1, 1),
    (bf16, 4096, 4096, 16, 48, 3),
]


def _launch_low_rank(
    dtype: torch.dtype, out_features: int, in_features: int, rank: int, num_rows: int, num_adapters: int
) -> None:
    rows, out = torch.empty(num_rows, in_features, dtype=dtype), torch.empty(num_rows, out_features, dtype=dtype)
    ranges = [[(index, num_rows if index + 1 == num_adapters else index + 1)] for index in range(num_adapters)]
    step = LowRankStep.build(ranges, np.zeros((num_adapters, num_adapters, 2), dtype=np.int64))
    add_low_rank(rows, out, step, num_adapters - 1, rank)


def _launch_write(dtype: torch.dtype, head_dim: int) -> None:
    pool = KVPool.allocate(2, 2, 8, 64, head_dim, dtype=dtype)
    key, value = torch.empty(2, 40, 8, head_dim, dtype=bf16).unbind(0)
    write_kv(key, value, torch.arange(40), pool, 0, torch.zeros(40, pool.num_kv_heads))


def _launch_copy(dtype: torch.dtype) -> None:
    copy_blocks(KVPool.allocate(4, 2, 8, 64, 128, dtype=dtype), torch.tensor([0, 1]), torch.tensor([2, 3]))


def _launch_hadamard(dtype: torch.dtype, result: torch.dtype, head_dim: int) -> None:
    hadamard_transform(torch.empty(40, 8, head_dim, dtype=dtype), result)


def _launch_dequantize(kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    pool = KVPool.allocate(2, 2, 8, block_size, head_dim, dtype=kv_dtype)
    dequantize_blocks(pool, 0, torch.zeros(3, dtype=torch.int32), dtype)


def cases(attention_cases: list[AttentionCase]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each case's name and a function that launches its kernels."""
    for case in attention_cases:
        yield str(case), case.launch
    for dtype in (bf16, fp8, int8, int4):
        for head_dim in (80, 128):
            yield f"{str(dtype)[6:]} D{head_dim}", partial(_launch_write, dtype, head_dim)
    for dtype, result, head_dim in ((bf16, fp32, 128), (bf16, bf16, 80), (fp32, fp32, 256), (bf16, fp32, 576)):
        name = f"{str(dtype)[6:]} to {str(result)[6:]} D{head_dim}"
        yield name, partial(_launch_hadamard, dtype, result, head_dim)
    yield "bfloat16", partial(_launch_copy, bf16)
    for kv_dtype, dtype, head_dim, block_size in DEQUANTIZE_CASES:
        name = f"{str(kv_dtype)[6:]} to {str(dtype)[6:]} D{head_dim} block{block_size}"
        yield name, partial(_launch_dequantize, kv_dtype, dtype, head_dim, block_size)
    for linear_case in LINEAR_CASES:
        yield str(linear_case), linear_case.launch
    for dtype, num_columns, first_row in NORM_CASES:
        name = f"{str(dtype)[6:]} {num_columns}, rows from {first_row}"
        yield name, partial(_launch_norms, dtype, num_columns, first_row)
    for dtype, num_columns, style, has_residual in FUSED_NORM_CASES:
        name = f"{str(dtype)[6:]} {num_columns} as {style}{' with residual' if has_residual else ''}"
        yield name, partial(_launch_fused_norm, dtype, num_columns, getattr(norm_style, style), has_residual)
    for dtype, num_columns, num_rows in SWIGLU_CASES:
        name = f"{str(dtype)[6:]} {num_columns}, rows {num_rows}"
        yield name, partial(_launch_swiglu, dtype, num_columns, num_rows)
    for case in LOW_RANK_CASES:
        dtype, out_features, in_features, rank, num_rows, _ = case
        name = f"{str(dtype)[6:]} {out_features}x{in_features} rank {rank}, rows {num_rows}"
        yield name, partial(_launch_low_rank, *case)


def compile_case(launch: Callable[[], None]) -> list[tuple[str, Any]]:
    """Run `launch` with compilation in place of launching. Returns the name and code of each kernel that it starts."""
    compiled: list[tuple[str, Any]] = []
    original_run = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append((function.fn.__name__, original_run(function, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(_NoDevice())
    try:
        launch()
    finally:
        JITFunction.run = original_run
        triton.runtime.driver.set_active(None)
    return compiled


class _NoDevice:
    """The part of a triton driver that compiling uses."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _describe(case: str, kernel_name: str, kernel: Any, instructions: Sequence[str]) -> CompiledCase:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _output_of("cuobjdump", "-res-usage", cubin.name)
    registers_and_stack = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers_and_stack, usage
    sass = "\n".join(instructions)
    return CompiledCase(
        case=case,
        kernel=kernel_name,
        triton=triton.__version__,
        registers=int(registers_and_stack[1]),
        stack_bytes=int(registers_and_stack[2]),
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        code_sha256=hashlib.sha256(kernel.asm["cubin"]).hexdigest(),
        instructions={name: len(re.findall(rf"\b{re.escape(name)}", sass)) for name in _INSTRUCTIONS},
        loop_instructions=_longest_loop(instructions),
    )


def _machine_code(cubin: bytes) -> bytes:
    """Return the section of an ELF file that holds the instructions of its one function."""
    # The fields e_shoff, e_shentsize, e_shnum and e_shstrndx of an ELF64 header.
    (section_table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, num_sections, name_section = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, section_table + i * entry_bytes) for i in range(num_sections)]
    names_start = sections[name_section][4]
    (code,) = [
        cubin[start : start + size]
        for name, _, _, _, start, size in sections
        if cubin.startswith(b".text.", names_start + name)
    ]
    return code


def _disassemble(codes: Sequence[bytes]) -> list[list[str]]:
    """Return the instructions of each function. `nvdisasm` runs once for all, since its start takes half a second."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as joined:
        joined.write(b"".join(codes))
        joined.flush()
        lines = _output_of("nvdisasm", "--binary", "SM90", joined.name).splitlines()
    instructions = iter([line for line in lines if _INSTRUCTION.match(line)])
    by_function = [list(islice(instructions, len(code) // _INSTRUCTION_BYTES)) for code in codes]
    assert not list(instructions)
    return by_function


def _longest_loop(instructions: Sequence[str]) -> int:
    """Count the instructions of the longest innermost loop: from the target of a backward branch to the branch."""
    first_address = _address(instructions[0])
    loops: list[tuple[int, int]] = []  # addresses, half-open
    for line in instructions:
        if branch := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", line):
            target, address = int(branch[1], 16), _address(line)
            if first_address <= target <= address:
                loops.append((target, address + _INSTRUCTION_BYTES))

    def contains_another(start: int, end: int) -> bool:
        return any(start <= other[0] and other[1] <= end for other in loops if other != (start, end))

    return (
        max((end - start for start, end in loops if not contains_another(start, end)), default=0) // _INSTRUCTION_BYTES
    )


def _address(line: str) -> int:
    instruction = _INSTRUCTION.match(line)
    assert instruction, line
    return int(instruction[1], 16)


def _output_of(tool: str, *arguments: str) -> str:
    result = subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def main() -> None:
    """Print one JSON line for each compiled kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="every head_dim, block size and tile, not only those that the tests compile"
    )
    parser.add_argument("--share", default="1/1", help="I/N: every Nth case, from the Ith on")
    options = parser.parse_args()
    share_number, num_shares = map(int, options.share.split("/"))
    attention_cases = [*ATTENTION_CASES, *SPECIALIZED_CASES]
    if options.all:
        attention_cases = [*ALL_ATTENTION_CASES, *ALL_SPECIALIZED_CASES]
    assert not os.environ.get("TRITON_INTERPRET"), "the interpreter does not compile"
    share = list(cases(attention_cases))[share_number - 1 :: num_shares]
    compiled = [(case, *kernel) for case, launch in share for kernel in compile_case(launch)]
    codes = list({_machine_code(kernel.asm["cubin"]) for _, _, kernel in compiled})
    instructions = dict(zip(codes, _disassemble(codes), strict=True))
    for case, kernel_name, kernel in compiled:
        described = _describe(case, kernel_name, kernel, instructions[_machine_code(kernel.asm["cubin"])])
        print(json.dumps(asdict(described)), flush=True)


if __name__ == "__main__":
    main()
