"""Log probabilities of tokens as arrays, which take a fifteenth of the memory of Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from radixkv.api.result import TokenLogprobs


class LogprobRows(NamedTuple):
    """Log probabilities of consecutive tokens.

    Attributes:
        logprobs: log probabilities, float32 `[num_tokens, 1 + num_top]`: first of the token itself, then of the most
            likely tokens at its position.
        token_ids: the most likely tokens, most likely first, uint32 `[num_tokens, num_top]`.
    """

    logprobs: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, items: Sequence[TokenLogprobs]) -> LogprobRows:
        """Return the rows of any sequence of at least one item. The rows of a table are views."""
        if isinstance(items, LogprobTable):
            return items.rows(slice(None))
        return cls(
            np.array([[each.logprob, *(logprob for _, logprob in each.top)] for each in items], np.float32),
            np.array([[token_id for token_id, _ in each.top] for each in items], np.uint32),
        )


class LogprobTable(Sequence[TokenLogprobs]):
    """A growing table of log probabilities of consecutive tokens.

    A table compares equal to any sequence of the same items. Items are created on access.

    Args:
        num_rows: tokens for which the first `put` reserves memory.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self._capacity = num_rows
        self._logprobs = np.empty((0, 1), np.float32)
        self._token_ids = np.empty((0, 0), np.uint32)
        self._length = 0

    def put(self, start: int, rows: LogprobRows) -> None:
        """Copy rows to the positions from `start` on, some of which may exist already. All rows have the same width.

        Complexity: O(rows), amortized.
        """
        assert start <= self._length, "rows leave no gap"
        end = start + len(rows.logprobs)
        if end > len(self._logprobs):
            self._grow(end, rows)
        self._logprobs[start:end], self._token_ids[start:end] = rows
        self._length = max(self._length, end)

    def extend(self, items: Sequence[TokenLogprobs]) -> None:
        """Append items."""
        if items:
            self.put(self._length, LogprobRows.of(items))

    def truncate(self, length: int) -> None:
        """Truncate the table to the first `length` tokens."""
        self._length = min(self._length, length)

    def rows(self, run: slice) -> LogprobRows:
        """Return a run of items as arrays, which are views."""
        return LogprobRows(self._logprobs[: self._length][run], self._token_ids[: self._length][run])

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if not isinstance(index, slice):
            position = range(self._length)[index]  # at least 0, also for a negative index
            return self[position : position + 1][0]
        logprobs, token_ids = (each.tolist() for each in self.rows(index))
        return [
            TokenLogprobs(logprob, tuple(zip(top_ids, top_logprobs, strict=True)))
            for (logprob, *top_logprobs), top_ids in zip(logprobs, token_ids, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(item == each for item, each in zip(self, other, strict=True))

    def _grow(self, num_rows: int, like: LogprobRows) -> None:
        """Reserve memory for rows as wide as `like`: for `num_rows`, or, beyond the capacity, for half as many more."""
        if num_rows > self._capacity:
            self._capacity = num_rows + num_rows // 2
        old_rows = self.rows(slice(None))
        self._logprobs = np.empty((self._capacity, like.logprobs.shape[1]), np.float32)
        self._token_ids = np.empty((self._capacity, like.token_ids.shape[1]), np.uint32)
        if self._length:
            self._logprobs[: self._length], self._token_ids[: self._length] = old_rows
