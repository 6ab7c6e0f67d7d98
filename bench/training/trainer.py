"""A training run: steps, progress, and checkpoints from which a killed run resumes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bench.training.muon import Muon
from bench.training.pace import Pace, learning_rate
from bench.training.sequences import STEP_TOKENS, Sequences

HIGHEST_LEARNING_RATE = 6e-3
_BETAS = (0.9, 0.95)
_MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run.

    Attributes:
        steps: number of completed steps.
        seconds: time spent in steps, including those before a restart.
        loss: loss of the last step in nats per token; infinite before the first step.
    """

    steps: int
    seconds: float
    loss: float

    def __str__(self) -> str:
        return f"step {self.steps}: loss {self.loss:.3f}, {self.steps * STEP_TOKENS / self.seconds:.0f} tokens/s"


class Trainer:
    """Trains a model in place. Two runs by steps with the same seed, machine and threads give the same weights.

    Args:
        module: the model, float32.
        sequences: the training sequences.
        pace: the budget.
        checkpoint: a file that `save` writes, and that the constructor reads if it exists; None for no checkpoints.
        now_s: reads the clock that measures steps, in seconds.

    Raises:
        ValueError: the checkpoint is that of a run with another seed.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        sequences: Sequences,
        pace: Pace,
        checkpoint: Path | None = None,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._module = module
        self._sequences = sequences
        self._pace = pace
        self._checkpoint = checkpoint
        self._now_s = now_s
        matrices = [each for name, each in module.named_parameters() if each.ndim == 2 and "embed" not in name]
        other_parameters = [each for name, each in module.named_parameters() if each.ndim != 2 or "embed" in name]
        self._optimizers = (
            Muon(matrices, HIGHEST_LEARNING_RATE),
            torch.optim.AdamW(other_parameters, HIGHEST_LEARNING_RATE, betas=_BETAS, weight_decay=0.0),
        )
        self.progress = Progress(0, 0.0, float("inf"))
        if checkpoint is not None and checkpoint.exists():
            self._restore(checkpoint)

    @property
    def is_done(self) -> bool:
        """Whether the budget is used up."""
        return self._pace.share(self.progress.seconds, self.progress.steps) >= 1

    def step(self) -> Progress:
        """Run one step on the next rows."""
        start_s = self._now_s()
        step_rate = learning_rate(self._pace.share(self.progress.seconds, self.progress.steps), HIGHEST_LEARNING_RATE)
        rows = self._sequences.rows(self.progress.steps)
        logits = self._module(rows[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), _MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = step_rate
            optimizer.step()
            optimizer.zero_grad()
        seconds = self.progress.seconds + self._now_s() - start_s
        self.progress = Progress(self.progress.steps + 1, seconds, loss.item())
        return self.progress

    def save(self) -> None:
        """Write the checkpoint atomically."""
        if self._checkpoint is None:
            return
        contents = {
            "module": self._module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": (self.progress.steps, self.progress.seconds, self.progress.loss),
            "seed": self._sequences.seed,
        }
        unfinished = self._checkpoint.with_suffix(".unfinished")
        torch.save(contents, unfinished)
        os.replace(unfinished, self._checkpoint)

    def _restore(self, checkpoint: Path) -> None:
        contents = torch.load(checkpoint, weights_only=True)
        if contents["seed"] != self._sequences.seed:
            raise ValueError(f"checkpoint: expected seed {self._sequences.seed}, got {contents['seed']}")
        self._module.load_state_dict(contents["module"])
        for optimizer, state in zip(self._optimizers, contents["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.progress = Progress(*contents["progress"])
