"""In dry runs, a wrong output fails only its row, and a missing peer has a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.kernels
from bench.attention_peers import Calls
from bench.kernels import main
from bench.parts.attention_inputs import (
    AttentionCase,
    AttentionInputs,
    Heads,
    expected_answer,
    make_inputs,
    worst_error,
)
from bench.parts.device_time import measure
from bench.parts.kernel_inputs import TokenWrites
from bench.parts.peers.sglang import load_extend_attention
from radixkv.kernels import reference
from radixkv.kernels.scoring import Scoring

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 32, 16)


def dry_run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the result of a dry run."""
    file = tmp_path / "kernels.json"
    status = main(["--dry-run", "--json", str(file), *options])
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return status, result


@pytest.mark.long
def test_every_kernel_is_checked_and_timed_with_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = dry_run(tmp_path)
    assert status == 0
    assert result["is_finished"]
    assert result["is_dry_run"]
    other_kernels = ["write_kv"] * 4 + ["copy_blocks", "add_rms_norm", "swiglu"] + ["linear"] * 4
    assert [row["kernel"] for row in result["rows"]] == other_kernels + ["paged_attention"] * 11 + ["shared_prefix"] * 3
    for row in result["rows"]:
        assert row["is_right"], row
        assert row["tflops"] == pytest.approx(row["matrix_share"] * result["matrix_tflops"])
        assert row["gb_per_s"] == pytest.approx(row["copy_share"] * result["copy_gb_per_s"])
        for peer in row["peers"].values():
            assert (peer.get("reason") is None) == peer["is_right"]
            assert not peer["is_right"] or peer["ratio"] == pytest.approx(peer["ms"] / row["ms"])
    variants = [row["case"].partition("bfloat16")[2] for row in result["rows"][11:16]]
    assert variants == ["", ", blocks in order", ", exact", ", specialized", ", specialized, exact"]
    over_quantized = [row["case"].partition("after 70, ")[2] for row in result["rows"][16:22]]
    formats = ["float8_e4m3fn", "int8", "int4"]
    assert over_quantized == formats + [f"{name}, dequantized first, specialized" for name in formats]
    for row, mode in zip(result["rows"][22:], ("", ", exact", ", specialized, exact"), strict=True):
        assert row["case"] == f"3 decode after 256 shared{mode}"
        assert row["peers"]["ours, not joined"]["is_right"]
    peers = result["rows"][11]["peers"]
    assert [name for name, peer in peers.items() if peer["is_right"]] == ["sdpa_flash", "flex"]
    printed = capsys.readouterr().out
    assert "times are meaningless" in printed
    assert "flashinfer_fa3, not measured in 1 of the rows: PeerUnavailable: needs a CUDA device" in printed
    assert "25 of 25 right" in printed


def test_a_wrong_answer_fails_its_row_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.kernels, "copy_blocks", lambda pool, sources, targets: None)
    status, result = dry_run(tmp_path, "--kernels", "write_kv", "copy_blocks")
    assert status == 1
    *writes, copy = result["rows"]
    assert all(row["is_right"] for row in writes)
    assert not copy["is_right"]
    assert "ms" not in copy
    assert copy["peers"]["torch"]["is_right"]
    assert "FAILED  wrong: off by inf, at most 0" in capsys.readouterr().out


def test_a_norm_without_the_residual_and_a_gate_without_its_activation_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.kernels, "add_rms_norm", lambda rows, _, *rest: (rows, reference.rms_norm(rows, *rest)))
    monkeypatch.setattr(bench.kernels, "swiglu", lambda gate, up: gate * up)
    status, result = dry_run(tmp_path, "--kernels", "add_rms_norm", "swiglu")
    assert status == 1
    assert [row["is_right"] for row in result["rows"]] == [False, False]
    assert all(row["peers"]["torch"]["is_right"] for row in result["rows"])


@pytest.mark.long
def test_a_kernel_that_raises_fails_its_row_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("illegal memory access\nand more")

    monkeypatch.setattr(bench.kernels, "write_kv", fail)
    monkeypatch.setattr(bench.kernels, "BlockCopies", fail)
    status, result = dry_run(tmp_path, "--kernels", "write_kv", "copy_blocks", "paged_attention", "--peers")
    assert status == 1
    failed = [row for row in result["rows"] if not row["is_right"]]
    assert [row["kernel"] for row in failed] == ["write_kv"] * 4 + ["copy_blocks"]
    assert {row["reason"] for row in failed} == {"RuntimeError: illegal memory access"}
    assert len(result["rows"]) == 16


def test_a_peer_with_a_wrong_answer_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(inputs: AttentionInputs) -> Calls:
        return [lambda: inputs.queries[0]]

    monkeypatch.setattr(bench.kernels, "peer", lambda name, sglang: prepare)
    status, result = dry_run(tmp_path, "--kernels", "paged_attention", "--peers", "flex", "--variants", "served")
    assert len(result["rows"]) == 1
    peer = result["rows"][0]["peers"]["flex"]
    assert status == 0
    assert peer["reason"].startswith("wrong: off by ")
    assert "ms" not in peer


def test_input_sets_are_larger_than_the_cache_and_are_used_in_turn() -> None:
    inputs = make_inputs(AttentionCase(20, 40), HEADS, cache_bytes=20_000, device=CPU)
    assert len(inputs.queries) == inputs.pool.num_layers
    assert inputs.pool.num_layers * inputs.num_bytes > 60_000
    query_and_output_bytes = 2 * 20 * (4 * 32) * 2  # of 20 tokens, in bfloat16
    kv_bytes = 2 * 60 * (2 * 32) * 2  # of 60 tokens
    assert inputs.num_bytes == query_and_output_bytes + kv_bytes
    with_more_layers = make_inputs(AttentionCase(20, 40), HEADS, cache_bytes=20_000, device=CPU, num_layers=32)
    assert with_more_layers.pool.num_layers == 32
    assert with_more_layers.num_bytes == inputs.num_bytes
    assert torch.equal(torch.stack(with_more_layers.queries), torch.stack(inputs.queries))
    turns: list[int] = []
    measure([lambda: turns.append(0), lambda: turns.append(1)], CPU)
    assert turns == [0, 1, 0, 1]


def test_the_expected_output_does_not_depend_on_the_rows_that_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = make_inputs(AttentionCase(20, 40), HEADS, cache_bytes=1, device=CPU)
    whole = reference.paged_attention(inputs.queries[0], inputs.pool, 0, inputs.batch, Scoring(inputs.scale))
    monkeypatch.setattr("bench.parts.attention_inputs._REFERENCE_ROWS", 7)
    assert worst_error(expected_answer(inputs), whole) < 0.01


def test_the_error_is_that_of_the_worst_vector() -> None:
    right = torch.randn(50, 4, 32)
    assert worst_error(right, right) == 0
    wrong = right.clone()
    wrong[17, 3] *= 1.5
    assert worst_error(wrong, right) == pytest.approx(0.5, rel=1e-3)
    wrong[0, 0, 0] = float("nan")
    assert worst_error(wrong, right) == float("inf")


def test_a_write_that_touches_another_slot_is_wrong() -> None:
    writes = TokenWrites(20, torch.int8, HEADS, cache_bytes=1, device=CPU)

    def write_to_another_slot(
        key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pool: Any, layer: int
    ) -> None:
        reference.write_kv(key, value, slots, pool, layer)
        pool.values[0, 1] ^= 1

    assert writes.contestant(reference.write_kv).error() == 0
    assert writes.contestant(write_to_another_slot).error() == float("inf")


FAKE_EXTEND_ATTENTION = """
from sglang.kernels.ops.attention.neighbour import NEIGHBOUR  # a file that imports nothing
from sglang.srt.environ import envs
from sglang.srt.utils import is_hip

def extend_attention_fwd(calls):
    calls.append((NEIGHBOUR, is_hip()))
"""


def test_sglangs_kernel_is_loaded_from_the_wheel_alone(tmp_path: Path) -> None:
    folder = tmp_path / "sglang/kernels/ops/attention"
    folder.mkdir(parents=True)
    for package in ("sglang", "sglang/kernels", "sglang/kernels/ops", "sglang/kernels/ops/attention"):
        (tmp_path / package / "__init__.py").write_text("raise ImportError('this is the engine')")
    (folder / "neighbour.py").write_text("NEIGHBOUR = 7")
    (folder / "extend_attention.py").write_text(FAKE_EXTEND_ATTENTION)
    calls: list[tuple[int, bool]] = []
    load_extend_attention(tmp_path)(calls)
    assert calls == [(7, False)]
