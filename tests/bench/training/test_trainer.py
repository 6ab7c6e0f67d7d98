"""A run that was killed resumes with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.training.pace import Pace
from bench.training.sequences import Sequences
from bench.training.trainer import Trainer

SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
TEXT = torch.arange(6000) % 17  # the next token can be predicted


def make_trainer(steps: int = 6, checkpoint: Path | None = None, seed: int = 0, **options: object) -> Trainer:
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, **SHAPE))
    pace = Pace(steps=steps)
    return Trainer(module, Sequences(TEXT, TEXT[:3000], seed), pace, checkpoint, **options)  # type: ignore[arg-type]


def train(run: Trainer, steps: int) -> list[float]:
    """Return the loss of each step."""
    return [run.step().loss for _ in range(steps)]


def test_the_loss_decreases() -> None:
    run = make_trainer(steps=40)
    first, *_, last = train(run, 40)
    assert last < 0.7 * first
    assert run.is_done


def test_a_killed_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    whole = train(make_trainer(), 6)
    killed = make_trainer(checkpoint=tmp_path / "checkpoint.pt")
    assert train(killed, 2) == whole[:2]
    killed.save()
    assert train(killed, 1) == whole[2:3], "this step is lost"
    resumed = make_trainer(checkpoint=tmp_path / "checkpoint.pt")
    assert resumed.progress.steps == 2
    assert train(resumed, 4) == whole[2:]
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    make_trainer(checkpoint=tmp_path / "checkpoint.pt").save()
    with pytest.raises(ValueError, match="checkpoint: expected seed 1, got 0"):
        make_trainer(checkpoint=tmp_path / "checkpoint.pt", seed=1)
