"""The outcomes of a demo's questions, and their printed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.service.client import Client

_TIMEOUT_S = 60.0


class PromptTokens(NamedTuple):
    """Number of tokens of a prompt, and how many of them were cached."""

    num_tokens: int
    cached_tokens: int

    def __str__(self) -> str:
        return f"{self.cached_tokens} of {self.num_tokens} prompt tokens cached"


@dataclass(frozen=True, slots=True)
class Talk:
    """The outcomes of the questions of several turns.

    Attributes:
        outcomes: for each question the tokens of its prompt, or the error message if it was not answered.
    """

    outcomes: Sequence[PromptTokens | str]

    @property
    def failures(self) -> tuple[str, ...]:
        """The error message of each question that was not answered."""
        return tuple(each for each in self.outcomes if isinstance(each, str))

    def __str__(self) -> str:
        answered = [each for each in self.outcomes if not isinstance(each, str)]
        share = sum(each.cached_tokens for each in answered) / max(1, sum(each.num_tokens for each in answered))
        return f"{len(answered)} answers, {len(self.failures)} errors, {share:.0%} of prompt tokens cached"


def num_finished(address: str) -> int:
    """Return the number of requests that a server has finished."""
    with Client(address, timeout_s=_TIMEOUT_S) as client:
        finished: int = client.stats().requests.finished
        return finished


def say(name: str, text: str) -> None:
    """Print a line of a demo, with a label."""
    print(f"{name:<10}{text}", flush=True)
