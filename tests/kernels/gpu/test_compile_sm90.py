"""Bounds of the sm_90 machine code of every kernel. They need no GPU: the compiler comes with triton."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixkv.kernels.gpu.attention_splits import DeviceCapacity
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.long

HARNESS = Path(__file__).with_name("compile_sm90.py")
SHARED_BYTES_LIMIT = 232448  # of one program on an H100 or H200


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    shares = [
        subprocess.Popen(
            [sys.executable, HARNESS, "--share", share],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in ("1/2", "2/2")
    ]
    rows = []  # one `CompiledCase` per kernel, as a dictionary
    for process in shares:
        printed, errors = process.communicate(timeout=4 * PATIENCE_S)
        assert process.returncode == 0, errors[-2000:]
        rows += [json.loads(line) for line in printed.splitlines()]
    return rows


def test_every_kernel_compiles(compiled: list[dict[str, Any]]) -> None:
    attention = {"_attend_tile", "_attend_tile_specialized", "_merge_partials", "_write_tile", "_copy_span"}
    attention |= {"_pack_rows", "_hadamard_tile"}
    exact = {"_multiply_tiles", "_mean_row", "_norm_row"}
    fused = {"_norm_row", "_gate_piece"}
    assert {row["kernel"] for row in compiled} == attention | exact | fused | {"_dequantize_tile", "_add_tile"}


def test_no_kernel_spills(compiled: list[dict[str, Any]]) -> None:
    assert [row for row in compiled if row["stack_bytes"] or row["instructions"]["LDL"]] == []


def test_registers_leave_room_for_every_warp(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        assert 0 < row["registers"] * row["num_warps"] * 32 <= 65536, row


def test_shared_memory_fits_the_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    assert [row for row in compiled if row["shared_bytes"] > SHARED_BYTES_LIMIT] == []


def test_plans_know_the_programs_that_a_multiprocessor_runs(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        case = re.search(r"D(\d+) rows(\d+)", row["case"])
        if not row["kernel"].startswith("_attend_tile") or case is None or "float32" in row["case"]:
            continue
        head_dim, tile_rows = map(int, case.groups())
        expected = DeviceCapacity(132, head_dim).cost(tile_rows).programs
        # Registers are allocated in multiples of 8 per thread. Each program reserves 1,024 bytes of shared memory.
        registers = -(-row["registers"] // 8) * 8 * row["num_warps"] * 32
        num_programs = min(65536 // registers, 233472 // (row["shared_bytes"] + 1024))
        # The plan's number is for a head dim of 128; with 64, a program may need only half of the registers.
        max_programs = (2 * expected if head_dim == 64 else expected) + (tile_rows == 16)
        is_k8v4 = "int4" in row["case"]  # needs more registers; the plan's number is for the other formats
        assert expected - (is_k8v4 and tile_rows == 16) <= num_programs <= max_programs, row


@pytest.mark.parametrize(
    ("case", "max_instructions"),
    [
        ("rows16 block64 G4 split", 350),
        ("rows16 block64 G4 pool int4", 900),
        ("rows128 block64 G4", 490),
        ("rows128 block64 G4 specialized", 400),
        ("rows128 block64 G4 pool int8", 720),
        ("rows128 block64 G4 pool float8_e4m3fn", 720),
    ],
)
def test_the_loop_over_64_keys_has_few_instructions(
    case: str, max_instructions: int, compiled: list[dict[str, Any]]
) -> None:
    loops = {
        row["loop_instructions"]
        for row in compiled
        if row["kernel"].startswith("_attend_tile") and row["case"].partition(", rows")[0] == f"bfloat16 D128 {case}"
    }
    assert loops
    assert 100 < min(loops) <= max(loops) <= max_instructions


def test_half_precision_attention_runs_on_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    attention = [row for row in compiled if row["kernel"] == "_attend_tile" and "float32" not in row["case"]]
    small = [row for row in attention if "rows16" in row["case"]]
    large = [row for row in attention if "rows16" not in row["case"]]
    assert small
    assert large
    assert all(row["instructions"]["HMMA"] for row in small)
    assert all(row["instructions"]["HGMMA"] for row in large)


def test_keys_and_values_arrive_by_asynchronous_copy(compiled: list[dict[str, Any]]) -> None:
    assert all(row["instructions"]["LDGSTS"] for row in compiled if row["kernel"] == "_attend_tile")


def test_specialized_warps_either_load_or_multiply(compiled: list[dict[str, Any]]) -> None:
    specialized = [row for row in compiled if row["kernel"] == "_attend_tile_specialized"]
    assert specialized
    for row in specialized:
        instructions = row["instructions"]
        assert row["num_warps"] == 12, row  # without specialization it would be the 4 of the launch
        assert instructions["USETMAXREG"], row  # warps that load give registers to warps that multiply
        assert instructions["UTMALDG"] == 4, row  # the queries of two groups of warps, keys and values
        assert instructions["HGMMA"], row
        assert not instructions["LDGSTS"], row


def test_queries_are_packed_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    packings = [row for row in compiled if row["kernel"] == "_pack_rows"]
    assert packings
    assert all(row["instructions"]["LDG.E.128"] and row["instructions"]["STG.E.128"] for row in packings)


def test_block_copies_move_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    (copy,) = [row for row in compiled if row["kernel"] == "_copy_span"]
    assert copy["instructions"]["LDG.E.128"] == copy["instructions"]["STG.E.128"] == 8


def test_dequantization_moves_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    dequantized = [row for row in compiled if row["kernel"] == "_dequantize_tile"]
    assert dequantized
    for row in dequantized:
        assert row["instructions"]["STG.E.128"], row
        has_short_vectors = row["case"].startswith("int4") and "D80" in row["case"]  # 40 bytes
        assert bool(row["instructions"]["LDG.E.128"]) != has_short_vectors, row


def test_half_precision_matmuls_run_on_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    matmuls = [row for row in compiled if row["kernel"] == "_multiply_tiles"]
    for row in matmuls:
        is_float32 = "float32" in row["case"]
        assert bool(row["instructions"]["HGMMA"]) != is_float32, row
        assert bool(row["instructions"]["FFMA"]) == is_float32, row


def test_tiles_are_loaded_by_tma_if_the_weight_permits(compiled: list[dict[str, Any]]) -> None:
    matmuls = [row for row in compiled if row["kernel"] == "_multiply_tiles"]
    assert {"TMA" in row["case"] for row in matmuls} == {False, True}
    for row in matmuls:
        assert bool(row["instructions"]["UTMALDG"]) == ("TMA" in row["case"]), row


@pytest.mark.parametrize(
    ("kernel", "num_variants"),
    [
        ("_multiply_tiles", 2),
        ("_mean_row", 1),
        ("_norm_row", 1),
        ("_gate_piece", 1),
        ("_add_tile", 1),
        ("_attend_tile", 1),
        ("_attend_tile_specialized", 1),
        ("_pack_rows", 1),
    ],
)
def test_one_binary_serves_any_row_count_and_alignment(
    kernel: str, num_variants: int, compiled: list[dict[str, Any]]
) -> None:
    codes: dict[str, list[str]] = {}
    for row in compiled:
        if (
            row["kernel"] == kernel
        ):  # the code is the same with and without splits; that of `_pack_rows`, also with sinks
            case = row["case"].partition(", rows")[0].replace(" split", "")
            case = case.replace(" sinks", "") if kernel == "_pack_rows" else case
            codes.setdefault(case, []).append(row["code_sha256"])
    repeated = [digests for digests in codes.values() if len(digests) > 1]
    assert len(repeated) == num_variants
    assert all(len(set(digests)) == 1 for digests in repeated)
    assert len({digests[0] for digests in codes.values()}) == len(codes)


def test_norms_load_16_bytes_at_a_time_from_aligned_rows(compiled: list[dict[str, Any]]) -> None:
    norms = [row for row in compiled if row["kernel"] in ("_mean_row", "_norm_row") and " 4096" in row["case"]]
    assert norms
    assert all(row["instructions"]["LDG.E.128"] for row in norms)


def test_gates_move_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    gates = [row for row in compiled if row["kernel"] == "_gate_piece" and " 37" not in row["case"]]
    assert gates
    assert all(row["instructions"]["LDG.E.128"] and row["instructions"]["STG.E.128"] for row in gates)


def test_adapters_add_on_tensor_cores_from_weights_that_arrive_by_asynchronous_copy(
    compiled: list[dict[str, Any]],
) -> None:
    additions = [row for row in compiled if row["kernel"] == "_add_tile"]
    assert additions
    for row in additions:
        assert bool(row["instructions"]["HMMA"]) == ("float32" not in row["case"]), row
        if "x4096" in row["case"]:
            assert row["instructions"]["LDGSTS"], row
            assert row["instructions"]["STG.E.128"], row
