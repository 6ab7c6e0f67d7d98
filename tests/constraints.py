"""Simple constraints for tests without a tokenizer."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidRequest


@dataclass(frozen=True)
class Rising:
    """Requires that each token is larger than the previous one, by at most `max_rise`; the first is below `max_rise`.

    No token is allowed after the largest one.

    Attributes:
        vocab_size: number of tokens.
        max_rise: maximum difference of two successive tokens.
        ends: tokens that are allowed at every position if they are stop tokens of the request.
        refuses_after: number of tokens after which computing the mask fails; None for never.
    """

    vocab_size: int
    max_rise: int
    ends: frozenset[int] = frozenset()
    refuses_after: int | None = None

    def start(self, stop_token_ids: Set[int]) -> RisingMatcher:
        return RisingMatcher(self, self.ends & stop_token_ids)


class RisingMatcher:
    """Follows the tokens of one answer.

    Attributes:
        num_masks: number of masks that were requested.
        accepted: the tokens so far.
    """

    def __init__(self, constraint: Rising, ends: Set[int]) -> None:
        self.num_masks = 0
        self.accepted: list[int] = []
        self._constraint = constraint
        self._ends = ends

    @property
    def refuses(self) -> bool:
        """Whether computing the next mask fails."""
        return len(self.accepted) == self._constraint.refuses_after

    def allowed(self) -> npt.NDArray[np.bool_]:
        self.num_masks += 1
        if self.refuses:
            raise InvalidRequest("rising: expected an allowed token, got none")
        last = self.accepted[-1] if self.accepted else -1
        allowed = np.zeros(self._constraint.vocab_size, dtype=np.bool_)
        allowed[last + 1 : last + 1 + self._constraint.max_rise] = True
        allowed[sorted(self._ends)] = True
        return allowed

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    @property
    def is_finished(self) -> bool:
        return self.accepted[-1:] == [self._constraint.vocab_size - 1]
