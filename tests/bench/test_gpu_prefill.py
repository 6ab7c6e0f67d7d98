"""In dry runs, warm and cold answers are compared before they are timed, and a difference fails the row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import gpu_prefill
from bench.exactness import build_runner
from bench.gpu_prefill import PrefillBench, main
from bench.parts.device_time import DeviceRates
from bench.parts.peers.transformers_prefix import Tokens, TransformersPrefix
from radixkv.compute.runner import Runner
from radixkv.errors import ConfigError
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.model import Model
from radixkv.model.tiny_model import build_tiny_model
from tests.kernels.gpu.interpreter import interpret_kernels

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def bench() -> PrefillBench:
    runner = build_runner("tiny", 1, torch.float32, torch.device("cpu"), 1024, is_exact=True)
    return PrefillBench(runner, 200, step_tokens=64, rates=DeviceRates(1e12, 1e9))


def test_all_variants_are_measured_in_both_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prefill.json"
    assert main(["--dry-run", "--json", str(file)]) == 0
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    lengths = [(row["mode"], row["suffix_tokens"], row["prefix_tokens"]) for row in result["rows"]]
    lengths_of_mode = [(5, 130), (64, 130), (5, 0), (64, 0)]
    assert lengths == [(mode, *each) for mode in ("fast", "exact") for each in lengths_of_mode]
    assert result["is_finished"]
    for row in result["rows"]:
        assert row["is_right"]
        assert row["transformers_reason"] is None
        assert row["mode"] == "fast" or row["error"] == 0
        assert row["weights_ratio"] == pytest.approx(row["ttft_ms"] / row["weights_ms"])
        assert row["recompute_ratio"] == pytest.approx(row["recompute_ms"] / row["ttft_ms"])
        assert row["transformers_ratio"] == pytest.approx(row["transformers_ms"] / row["ttft_ms"])
    assert "times are meaningless" in capsys.readouterr().out


def measure(bench: PrefillBench, suffix_tokens: int, prefix_tokens: int, rounds: int = 1) -> dict[str, Any]:
    """Return the row after all variants have been measured."""
    *_, row = bench.measure(suffix_tokens, prefix_tokens, rounds)
    return row


def test_the_time_of_a_hit_is_reported_before_any_other_variant(bench: PrefillBench) -> None:
    names_of_times = [{key for key in row if key.endswith("_ms")} for row in bench.measure(9, 77, rounds=1)]
    assert names_of_times == [
        {"ttft_ms"},
        {"ttft_ms", "recompute_ms"},
        {"ttft_ms", "recompute_ms", "transformers_ms"},
    ]


def test_a_long_suffix_is_also_computed_in_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_prefill, "_SHORT_STEP_TOKENS", 32)
    runner = build_runner("tiny", 1, torch.float32, torch.device("cpu"), 1024, is_exact=True)
    bench = PrefillBench(runner, 200, step_tokens=512, rates=DeviceRates(1e12, 1e9))
    tokens_of_steps: list[int] = []
    original_prepare = Runner.prepare

    def prepare(self: Runner, chunks: Any) -> Any:
        tokens_of_steps.append(sum(chunk.num_tokens for chunk in chunks))
        return original_prepare(self, chunks)

    monkeypatch.setattr(Runner, "prepare", prepare)
    row = measure(bench, 40, 77)
    assert row["short_steps_ratio"] == pytest.approx(row["short_steps_ms"] / row["ttft_ms"])
    assert tokens_of_steps.count(32) == tokens_of_steps.count(8) == 1, "40 tokens in steps of at most 32"
    assert "short_steps_ms" not in measure(bench, 32, 77)


def test_a_variant_that_fails_has_a_reason_and_the_others_are_timed(
    bench: PrefillBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_ask = PrefillBench.ask

    def fail_recomputation(
        self: PrefillBench, prompt: Tokens, *, reads: bool = True, wants_logits: bool = False, **options: Any
    ) -> Any:
        if not reads and not wants_logits:
            raise RuntimeError("out of memory")
        return original_ask(self, prompt, reads=reads, wants_logits=wants_logits, **options)

    monkeypatch.setattr(PrefillBench, "ask", fail_recomputation)
    row = measure(bench, 9, 77)
    assert row["is_right"]
    assert row["recompute_reason"] == "RuntimeError: out of memory"
    assert row["ttft_ms"] > 0
    assert row["transformers_ms"] > 0


def test_steps_are_also_timed_without_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "has_graphs", True)
    runner = build_runner("tiny", 1, torch.float32, torch.device("cpu"), 1024, is_exact=True)
    bench = PrefillBench(runner, 200, step_tokens=64, rates=DeviceRates(1e12, 1e9))
    row = measure(bench, 9, 77, rounds=2)
    assert row["launched_ratio"] == pytest.approx(row["launched_ms"] / row["ttft_ms"])
    assert bench._core_without_graphs is not None
    assert bench._core_without_graphs._runner is not runner


def test_a_prompt_reuses_only_its_prefix(bench: PrefillBench) -> None:
    bench.cache_prefix(200)
    for prefix_tokens in (200, 77, 77, 0, 0):
        result = bench.ask(bench.prompt(9, prefix_tokens))
        assert result.usage.cached_tokens == prefix_tokens
    prompt = bench.prompt(9, 77)
    assert bench.ask(prompt, reads=False).usage.cached_tokens == 0
    assert bench.ask(prompt).usage.cached_tokens == 77


def test_a_hit_that_changes_the_answer_is_not_timed(bench: PrefillBench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(bench, 9, 77)["is_right"]
    monkeypatch.setattr(gpu_prefill, "_difference", lambda *_: 1e-6)
    row = measure(bench, 9, 77)
    assert row == {"is_right": False, "error": 1e-6, "reason": "the cache changes the answer: off by 1e-06"}


def test_a_failure_of_transformers_has_a_reason(bench: PrefillBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(TransformersPrefix, "_forward", fail)
    row = measure(bench, 9, 77)
    assert row["is_right"]
    assert row["transformers_reason"] == "RuntimeError: no kernel"
    assert "transformers_ms" not in row
    assert row["recompute_ms"] > 0


def test_transformers_runs_without_the_kernels_of_radixkv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of radixkv would raise, because they are interpreted only while the model is built."""
    with monkeypatch.context() as patch:
        interpret_kernels(patch)
        model = Model("tiny", build_tiny_model(ATTENTION_NAME), torch.device("cpu"), is_exact=False, is_fused=True)
    assert "forward" in vars(model.module.model.norm)
    tokens = np.arange(9, dtype="<u4")
    unfused_model = Model("tiny", build_tiny_model(ATTENTION_NAME), model.device, is_exact=False, is_fused=False)
    logits = []
    for each in (model, unfused_model):
        prefix = TransformersPrefix(each, tokens, 9)
        with prefix.running():
            prefix.restore(9)
            logits.append(prefix.logits(tokens, 9))
    np.testing.assert_array_equal(*logits)


def test_the_cache_of_transformers_grows_with_the_prefix() -> None:
    model = Model("tiny", build_tiny_model(ATTENTION_NAME), torch.device("cpu"), is_exact=False, is_fused=False)
    tokens = np.arange(40, dtype="<u4")
    restored_once, restored_repeatedly = (TransformersPrefix(model, tokens, 16) for _ in range(2))
    with restored_once.running():
        restored_once.restore(40)
        expected = restored_once.logits(tokens[:3], 40)
        for length in (7, 40, 5, 40):
            restored_repeatedly.restore(length)
        np.testing.assert_allclose(restored_repeatedly.logits(tokens[:3], 40), expected, rtol=1e-3, atol=1e-5)


def test_all_weights_except_the_embeddings_are_read(bench: PrefillBench) -> None:
    module = bench._model.module
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    num_read = num_parameters - module.get_input_embeddings().weight.numel()
    bytes_per_s = 1e9  # of the bench above
    assert bench.weights_ms == pytest.approx(1000 * 4 * num_read / bytes_per_s)


def test_a_mode_that_is_refused_fails_its_rows_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_build_runner = gpu_prefill.build_runner

    def refuse(*arguments: Any, is_exact: bool) -> Any:
        if is_exact:
            raise ConfigError("not on this device")
        return original_build_runner(*arguments, is_exact=is_exact)

    monkeypatch.setattr(gpu_prefill, "build_runner", refuse)
    file = tmp_path / "prefill.json"
    assert main(["--dry-run", "--json", str(file)]) == 1
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["is_right"] for row in rows] == [True] * 4 + [False] * 4
    assert rows[4]["reason"] == "ConfigError: not on this device"


def test_a_row_that_fails_after_it_was_printed_is_printed_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_after_two_measurements(*_: object) -> Iterator[dict[str, Any]]:
        yield {"is_right": True, "ttft_ms": 1.0, "weights_ratio": 2.0}
        yield {"recompute_ms": 3.0, "recompute_ratio": 3.0}
        raise RuntimeError("no memory")

    fake_bench = SimpleNamespace(weights_ms=0.5, measure=fail_after_two_measurements)
    monkeypatch.setattr(gpu_prefill, "_make_bench", lambda *_: fake_bench)
    assert main(["--dry-run", "--modes", "fast", "--suffixes", "5", "--prefixes", "130"]) == 1
    first, variant, failure = capsys.readouterr().out.splitlines()[2:]
    assert first.split() == ["fast", "5", "130", "1.00", "2.00"]
    assert variant.split()[0] == "recompute"
    assert failure.endswith("FAILED  RuntimeError: no memory")
