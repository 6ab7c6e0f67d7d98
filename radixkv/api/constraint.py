"""Constrained decoding: the protocols by which a grammar decides which tokens may come next."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Matcher(Protocol):
    """The state of the constraint of one completion. To be used by one thread at a time.

    If a matcher or a constraint raises an exception that is not documented here, only its own request fails.
    """

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may come next, bool `[vocab_size]`, at least one. The caller must not change the array.

        Raises:
            RequestError: no token may come next, or the computation takes too long. The message names the field.
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
            stop_token_ids: tokens that end the completion. Those without text, such as the model's end-of-sequence
                token, are allowed exactly where the completion may end.
        """
        ...
