"""Log probabilities of a prompt, as arrays: as objects of Python they would take fifteen times the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from radixkv.api.result import TokenLogprobs


class LogprobRows(NamedTuple):
    """Log probabilities of tokens that follow each other.

    Attributes:
        logprobs: of each token, and then of the most likely ones there, float32 `[num_tokens, 1 + num_top]`.
        token_ids: the most likely tokens, most likely first, uint32 `[num_tokens, num_top]`.
    """

    logprobs: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.uint32]


class PromptLogprobs(Sequence[TokenLogprobs]):
    """Log probabilities of a prompt's tokens but the first, from the second one on as far as they are computed.

    Equal to any sequence of the same items, which are made when they are asked for.

    Args:
        num_rows: tokens of the prompt but the first.
        num_top: most likely tokens in the place of each.
    """

    def __init__(self, num_rows: int, num_top: int) -> None:
        self._logprobs = np.empty((num_rows, 1 + num_top), np.float32)
        self._token_ids = np.empty((num_rows, num_top), np.uint32)
        self._num_told = 0

    def put(self, start: int, rows: LogprobRows) -> None:
        """Copy rows to the places from `start` on, of which some may have been told before.

        Complexity: a copy of the rows.
        """
        assert start <= self._num_told, "prompts are computed from their start on"
        end = start + len(rows.logprobs)
        self._logprobs[start:end], self._token_ids[start:end] = rows
        self._num_told = max(self._num_told, end)

    def rows(self, run: slice) -> LogprobRows:
        """Return a run of items as arrays, which are views."""
        return LogprobRows(self._logprobs[: self._num_told][run], self._token_ids[: self._num_told][run])

    def __len__(self) -> int:
        return self._num_told

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if not isinstance(index, slice):
            place = range(self._num_told)[index]
            return self[place : place + 1][0]
        logprobs, token_ids = (each.tolist() for each in self.rows(index))
        return [
            TokenLogprobs(own, tuple(zip(ids, top, strict=True)))
            for (own, *top), ids in zip(logprobs, token_ids, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(own == each for own, each in zip(self, other, strict=True))
