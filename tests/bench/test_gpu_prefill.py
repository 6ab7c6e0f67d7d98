"""A dry run: warm and cold answers are compared before they are timed; a difference fails the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import gpu_prefill
from bench.exactness import build_runner
from bench.gpu_prefill import Bench, main
from bench.parts.device_time import Rates
from bench.parts.peers.transformers_prefix import TransformersPrefix
from radixkv.compute.runner import Runner
from radixkv.errors import ConfigError
from radixkv.model.attention.paged_step import ATTENTION_NAME
from radixkv.model.model import Model
from radixkv.model.tiny_model import build_tiny_model
from tests.kernels.interpreter import interpret_kernels


@pytest.fixture(scope="module")
def bench() -> Bench:
    runner = build_runner("tiny", 1, torch.float32, torch.device("cpu"), 1024, is_exact=True)
    return Bench(runner, 200, step_tokens=64, rates=Rates(1e12, 1e9))


def test_it_measures_all_ways_in_both_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prefill.json"
    assert main(["--dry-run", "--json", str(file)]) == 0
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    lengths = [(row["mode"], row["suffix_tokens"], row["prefix_tokens"]) for row in result["rows"]]
    one_mode = [(5, 130), (64, 130), (5, 0), (64, 0)]
    assert lengths == [(mode, *each) for mode in ("exact", "fast") for each in one_mode]
    assert result["is_finished"]
    for row in result["rows"]:
        assert row["is_right"]
        assert row["transformers_reason"] is None
        assert row["mode"] == "fast" or row["error"] == 0
        assert row["weights_ratio"] == pytest.approx(row["ttft_ms"] / row["weights_ms"])
        assert row["recompute_ratio"] == pytest.approx(row["recompute_ms"] / row["ttft_ms"])
        assert row["transformers_ratio"] == pytest.approx(row["transformers_ms"] / row["ttft_ms"])
    assert "times mean nothing" in capsys.readouterr().out


def test_recorded_steps_are_timed_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "has_graphs", True)
    runner = build_runner("tiny", 1, torch.float32, torch.device("cpu"), 1024, is_exact=True)
    bench = Bench(runner, 200, step_tokens=64, rates=Rates(1e12, 1e9))
    row = bench.measure(9, 77, rounds=2)
    assert row["launched_ratio"] == pytest.approx(row["launched_ms"] / row["ttft_ms"])
    assert bench._core_without_graphs is not None
    assert bench._core_without_graphs._runner is not runner


def test_a_prompt_reuses_its_prefix_and_nothing_else(bench: Bench) -> None:
    for prefix_tokens in (200, 77, 77, 0, 0):
        result = bench.ask(bench.prompt(9, prefix_tokens))
        assert result.usage.cached_tokens == prefix_tokens
    prompt = bench.prompt(9, 77)
    assert bench.ask(prompt, reads=False).usage.cached_tokens == 0
    assert bench.ask(prompt).usage.cached_tokens == 77


def test_a_hit_that_changes_the_answer_is_not_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.measure(9, 77, rounds=1)["is_right"]
    monkeypatch.setattr(gpu_prefill, "_difference", lambda *_: 1e-6)
    row = bench.measure(9, 77, rounds=1)
    assert row == {"is_right": False, "error": 1e-6, "reason": "the cache changes the answer: off by 1e-06"}


def test_transformers_may_fail_and_says_why(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(TransformersPrefix, "_forward", broken)
    row = bench.measure(9, 77, rounds=1)
    assert row["is_right"]
    assert row["transformers_reason"] == "RuntimeError: no kernel"
    assert "transformers_ms" not in row
    assert row["recompute_ms"] > 0


def test_transformers_runs_without_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels would raise here, because nothing interprets them."""
    with monkeypatch.context() as patch:
        interpret_kernels(patch)
        model = Model("tiny", build_tiny_model(ATTENTION_NAME), torch.device("cpu"), is_exact=False, is_fused=True)
    assert "forward" in vars(model.module.model.norm)
    tokens = np.arange(9, dtype="<u4")
    written = Model("tiny", build_tiny_model(ATTENTION_NAME), model.device, is_exact=False, is_fused=False)
    expected = TransformersPrefix(written, tokens, 9)
    got = TransformersPrefix(model, tokens, 9)
    np.testing.assert_array_equal(got.logits(tokens, 9), expected.logits(tokens, 9))


def test_a_goal_is_printed_as_ratios() -> None:
    row = {"mode": "exact", "suffix_tokens": 64, "prefix_tokens": 8192, "weights_ratio": 1.5, "recompute_ratio": 12.25}
    assert gpu_prefill._goal(row) == (
        "goal, exact: 64 tokens after 8192 take 1.50 times the reading of the weights (at most 2) and "
        "12.2 times less than without the cache (at least 10)"
    )


def test_weights_are_read_but_for_the_embeddings(bench: Bench) -> None:
    module = bench._model.module
    numbers = sum(parameter.numel() for parameter in module.parameters()) - module.get_input_embeddings().weight.numel()
    assert bench.weights_ms == pytest.approx(numbers * 4 / 1e9 * 1e3)


def test_a_mode_that_is_refused_fails_its_rows_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = gpu_prefill.build_runner

    def refuse(*arguments: Any, is_exact: bool) -> Any:
        if is_exact:
            raise ConfigError("not on this device")
        return original(*arguments, is_exact=is_exact)

    monkeypatch.setattr(gpu_prefill, "build_runner", refuse)
    file = tmp_path / "prefill.json"
    assert main(["--dry-run", "--json", str(file)]) == 1
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["is_right"] for row in rows] == [False] * 4 + [True] * 4
    assert rows[0]["reason"] == "ConfigError: not on this device"
