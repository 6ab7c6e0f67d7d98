"""Constrained decoding: which tokens may come next, decided outside the engine."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Matcher(Protocol):
    """The state of the constraint of one completion. To be used by one thread at a time.

    What it raises against its promise, as what a constraint does, fails its request alone.
    """

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may come next, bool `[vocab_size]`, at least one. The caller must not change the array.

        Raises:
            RequestError: none may come, or it takes too long to find out. The message names the field.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the next token, which must be an allowed one. Never raises."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the completion is finished and no token with text may follow. Never raises."""
        ...


class Constraint(Protocol):
    """A constraint, such as a grammar, for any number of completions at the same time."""

    def start(self, stop_token_ids: Set[int]) -> Matcher:
        """Return the state for a new completion.

        Args:
            stop_token_ids: tokens that end the answer. Those of them that have no text, as a model's own end of
                sequence, may come where the answer may end, and nowhere else.
        """
        ...
