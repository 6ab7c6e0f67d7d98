import json
import math
import sys
from pathlib import Path

import pytest
import torch

from bench.parts.quality import Command, Comparison, Quality, held_out_texts, load, row_of
from radixkv.errors import ConfigError


def test_predictions_are_compared_over_all_texts() -> None:
    """Two texts of two and three tokens, over a vocabulary of two tokens."""
    comparison = Comparison()
    # Logits that give the tokens the probabilities 3/4 and 1/4, or 1/2 each.
    unequal, equal = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
    comparison.add(equal.expand(2, 2), unequal.expand(2, 2), torch.tensor([0, 0]))
    comparison.add(unequal.expand(3, 2), unequal.expand(3, 2), torch.tensor([1, 0, 0]))
    quality = comparison.quality()
    losses = [math.log(2), math.log(4 / 3), math.log(4 / 3)]
    assert quality.perplexity == pytest.approx(math.exp(sum(losses) / 3))
    assert quality.perplexity_change == pytest.approx(math.exp((losses[0] - losses[1]) / 3) - 1)
    assert quality.kl == pytest.approx(2 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 5)
    assert quality.same_top == 1


def test_texts_come_from_all_parts_of_the_held_out_documents() -> None:
    texts = held_out_texts("tiny", 4, 50)
    assert [len(text) for text in texts] == [50] * 4
    assert len({tuple(text.tolist()) for text in texts}) == 4


def test_a_missing_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--model: .*missing\.gguf"):
        held_out_texts("missing.gguf", 1, 50)


def test_a_command_prints_and_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command("nothing", "Measure nothing.", "what", "{what}", 3, {"tokens": 5, "budgets": (6, 7)})
    model = load("tiny")
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["nothing", "--texts", "2", "--budgets", "8", "9", "--json", str(file)])
    assert command.run(lambda path, options: [row_of(model, Quality(20.0, 0.01, 0.5, 0.25), what=path)]) == 0
    written = json.loads(file.read_text(encoding="utf-8"))
    assert (written["texts"], written["tokens"], written["budgets"]) == (2, 5, [8, 9])
    assert written["rows"] == [
        {"model": "tiny", "what": "tiny", "perplexity": 20, "perplexity_change": 0.01, "kl": 0.5, "same_top": 0.25}
    ]
    assert "+1.00%" in capsys.readouterr().out


def test_a_refused_model_ends_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(path: str, options: object) -> list[dict[str, float | int | str | None]]:
        raise ConfigError(f"no {path}")

    monkeypatch.setattr(sys, "argv", ["nothing", "--model", "here"])
    assert Command("nothing", "Measure nothing.", "", "", 3, {}).run(refuse) == 2
    assert capsys.readouterr().err == "error: no here\n"
