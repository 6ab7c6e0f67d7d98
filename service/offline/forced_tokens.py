"""A constraint that forces given tokens, so that the engine computes their log probabilities."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt


class ForcedTokens:
    """A constraint that allows exactly one completion; see `radixkv.api.constraint`.

    Args:
        token_ids: the tokens of the completion, at least one.
        vocab_size: number of the model's tokens.
    """

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._token_ids = token_ids
        self._vocab_size = vocab_size

    def start(self, stop_token_ids: Set[int]) -> ForcedTokensMatcher:
        """Return the state for a new completion. No token may end it early."""
        return ForcedTokensMatcher(self._token_ids, self._vocab_size)


class ForcedTokensMatcher:
    """The position in a forced completion.

    Args:
        token_ids: the tokens of the completion, at least one.
        vocab_size: number of the model's tokens.
    """

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._token_ids = token_ids
        self._num_accepted = 0
        self._mask = np.zeros(vocab_size, np.bool_)
        self._allowed_id = token_ids[0]

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return a mask that allows only the next token, bool `[vocab_size]`. It is valid until the next call."""
        self._mask[self._allowed_id] = False
        self._allowed_id = self._token_ids[self._num_accepted]
        self._mask[self._allowed_id] = True
        return self._mask

    def accept(self, token_id: int) -> None:
        """Advance by the next token."""
        self._num_accepted += 1

    @property
    def is_finished(self) -> bool:
        """Whether all tokens were accepted."""
        return self._num_accepted == len(self._token_ids)
