"""Constraints of answers: which tokens may come next, decided outside the engine."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Matcher(Protocol):
    """Follows one answer, token by token. To be used by one thread at a time.

    What it raises against its promise, as what a constraint does, fails its request alone.
    """

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may come next, bool `[vocab_size]`: at least one. The caller may not change it.

        Raises:
            RequestError: none may come, or it takes too long to find out. The message names the field.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take the next token, one that may come. Never raises."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and no token with text may follow. Never raises."""
        ...


class Constraint(Protocol):
    """Something that answers must follow, several of them at the same time."""

    def start(self, stop_token_ids: Set[int]) -> Matcher:
        """Return what follows a new answer.

        Args:
            stop_token_ids: tokens that end the answer. Those of them that have no text, as a model's own end of
                sequence, may come where the answer may end, and nowhere else.
        """
        ...
