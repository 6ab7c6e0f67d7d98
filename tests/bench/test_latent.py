import json
from pathlib import Path

import pytest
import torch

from bench.latent import ExpandedStep, config_of, main, measure, model_of, variants_of
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionCall

SMALL = ("--layers", "2", "--experts", "4", "--divisor", "16", "--dtypes", "float32", "--rounds", "1")


def test_both_variants_are_timed_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--cached", "100", "--new", "1", "9", "--json", str(tmp_path / "latent.json")])
    result = json.loads((tmp_path / "latent.json").read_text())
    assert [(row["cached_tokens"], row["new_tokens"]) for row in result["rows"]] == [(100, 1), (100, 9)]
    for row in result["rows"]:
        assert row["latent_token_bytes"] == 2 * (512 + 64) // 16 * 4
        assert row["expanded_token_bytes"] == 2 * 16 * 2 * (128 + 64) // 16 * 4
        names = [f"{variant}{kind}" for variant in ("latent", "expanded") for kind in ("", "_cold")]
        assert all(row[f"{name}_{unit}"] > 0 for name in names for unit in ("ms", "processor_ms"))
    first, second = result["rows"]
    assert first["latent_cold_ms"] == second["latent_cold_ms"], (
        "the cold prefill is measured once for all numbers of new tokens"
    )
    assert result["command"].startswith("python -m bench.latent --layers 2")
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(config_of(2, 4, 16), "float32")
    variants = variants_of(model, 128)
    wrong = variants["latent"]._replace(wrap=lambda step: HalvedStep(step))
    monkeypatch.setattr("bench.latent.variants_of", lambda *_: {**variants, "latent": wrong})
    with pytest.raises(AssertionError, match="logits: expected the same in both variants"):
        measure(model, "float32", 100, [1], 1)


class HalvedStep:
    """A step with half of the attention output."""

    def __init__(self, step: object) -> None:
        self._step = step

    def attend(self, *arguments: object) -> object:
        return self._step.attend(*arguments) / 2


class RecordingStep:
    """Records the values, and returns the query plus the index of the layer."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.value = call.value
        return call.query + call.layer


def test_values_are_padded_to_the_size_of_keys_and_outputs_are_truncated() -> None:
    recorder, query, value = RecordingStep(), torch.randn(3, 2, 6), torch.randn(3, 2, 4)
    output = ExpandedStep(recorder).attend(AttentionCall(5, query, query, value, Scoring(1.0)))
    assert torch.equal(recorder.value, torch.cat((value, torch.zeros(3, 2, 2)), -1))
    assert torch.equal(output, (query + 5)[..., :4])
