"""Trains the embedded model, and writes its weights.

python -m bench.training --minutes 60                         # resumes from build/training/checkpoint.pt if it exists
python -m bench.training --steps 1000 --fresh --weights FILE  # by steps: reproducible on one machine
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from bench.training.corpus import training_documents
from bench.training.pace import Pace
from bench.training.sequences import build_sequences
from bench.training.tokenizer import load_tokenizer
from bench.training.trainer import Trainer
from radixkv.model.tiny_model import tiny_config, write_weights

_SAVE_PERIOD_S = 120.0
_REPORT_PERIOD_STEPS = 10


def train(trainer: Trainer) -> None:
    """Run steps until the budget is used. Prints the progress, and writes checkpoints."""
    saved_s = time.monotonic()
    while not trainer.is_done:
        progress = trainer.step()
        if progress.steps % _REPORT_PERIOD_STEPS == 0:
            print(progress, flush=True)
        if time.monotonic() - saved_s > _SAVE_PERIOD_S:
            trainer.save()
            saved_s = time.monotonic()
    trainer.save()


def main() -> None:
    """Train and write the weights."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--minutes", type=float, help="minutes of training; restarts and the time between them do not count"
    )
    budget.add_argument("--steps", type=int, help="number of steps of 2,048 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/training/checkpoint.pt"))
    parser.add_argument("--fresh", action="store_true", help="start from scratch even if there is a checkpoint")
    parser.add_argument("--weights", type=Path, default=Path("build/training/weights.safetensors"))
    options = parser.parse_args()
    for path in (options.checkpoint, options.weights):
        path.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        options.checkpoint.unlink(missing_ok=True)
    sequences = build_sequences(training_documents(), load_tokenizer(), options.seed)
    print(f"{sequences.text.numel()} tokens of text, {sequences.chats.numel()} of chats", flush=True)
    torch.manual_seed(options.seed)
    module = LlamaForCausalLM(tiny_config())
    pace = Pace(None if options.minutes is None else 60 * options.minutes, options.steps)
    trainer = Trainer(module, sequences, pace, options.checkpoint)
    train(trainer)
    write_weights(module, options.weights)
    print(f"{trainer.progress}; wrote {options.weights}")


if __name__ == "__main__":
    main()
