"""The rule that says which parts of a prompt its next token needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Reach:
    """The tokens before a position whose parts are needed to go on from there.

        tokens   [0 ............................ upto - num_tokens ........ upto)
        parts     nobody needs them for this      | needed to compute from `upto`

    Layers with a sliding window of `w` tokens need `w - 1` before the next one.

    Attributes:
        num_tokens: tokens before the next one, at least 1.
    """

    num_tokens: int

    @classmethod
    def of_window(cls, window: int) -> Reach:
        """Return the reach of layers whose queries see `window` tokens, their own included.

        A window of one token sees nothing before, but the block that is being written is needed all the same.

        >>> Reach.of_window(512).first_token(600)
        89
        """
        return cls(max(1, window - 1))

    def first_token(self, upto: int) -> int:
        """Return the first token whose part is needed to go on from `upto`."""
        return max(0, upto - self.num_tokens)

    def longest(self, has_part: npt.NDArray[np.bool_], num_tokens: int, block_size: int) -> int:
        """Find the longest beginning of a prompt from whose end one can go on.

        Args:
            has_part: bool `[ceil(num_tokens / block_size)]`, whether each block of the prompt has its part.
            num_tokens: tokens that are cached.
            block_size: tokens a block.

        Returns:
            `num_tokens` or fewer; 0 if there is no such beginning.

        Complexity: a pass over `has_part`, and O(1) for each run of blocks without a part.

        >>> Reach(num_tokens=3).longest(np.array([True, False, True, True]), num_tokens=15, block_size=4)
        15
        >>> Reach(num_tokens=5).longest(np.array([True, False, False, True]), num_tokens=15, block_size=4)
        4
        """
        end = has_part.size
        while end:
            missing = np.flatnonzero(~has_part[:end])
            start = int(missing[-1]) + 1 if missing.size else 0  # blocks [start, end) have theirs
            upto = min(end * block_size, num_tokens)
            if self.first_token(upto) >= start * block_size:
                return upto
            end = start - 1 if start else 0
        return 0

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the parts that a request of `num_tokens` tokens needs at most, the tokens of its step excepted.

        They are those within reach, which begin and end inside a block; one that is written next; and one that is
        copied.
        """
        return min(-(-num_tokens // block_size), -(-self.num_tokens // block_size) + 2) + 1
