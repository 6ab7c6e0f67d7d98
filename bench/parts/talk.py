"""Conversations of a demo, and their printed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.service.client import Client

_TIMEOUT_S = 60.0


class PromptTokens(NamedTuple):
    """Tokens of a prompt, and those of them that were cached."""

    num_tokens: int
    cached_tokens: int

    def __str__(self) -> str:
        return f"{self.cached_tokens} of {self.num_tokens} prompt tokens cached"


@dataclass(frozen=True, slots=True)
class Talk:
    """Questions of some turns, and what became of them.

    Attributes:
        outcomes: for each question the tokens of its prompt, or a message that says why it was not answered.
    """

    outcomes: Sequence[PromptTokens | str]

    @property
    def failures(self) -> tuple[str, ...]:
        """A message for each question that was not answered."""
        return tuple(each for each in self.outcomes if isinstance(each, str))

    def __str__(self) -> str:
        answered = [each for each in self.outcomes if not isinstance(each, str)]
        share = sum(each.cached_tokens for each in answered) / max(1, sum(each.num_tokens for each in answered))
        return f"{len(answered)} answers, {len(self.failures)} errors, {share:.0%} of prompt tokens cached"


def num_finished(address: str) -> int:
    """Ask a server how many requests it has finished."""
    with Client(address, timeout_s=_TIMEOUT_S) as client:
        finished: int = client.stats().requests.finished
        return finished


def say(name: str, text: str) -> None:
    """Print a line of a demo."""
    print(f"{name:<10}{text}", flush=True)
