"""Random prompts for the stages of the product part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Prompt = npt.NDArray[np.uint32]

# Smaller ids are often special tokens, such as the end of a sequence.
_FIRST_TOKEN_ID = 16


class RandomPrompts:
    """Draws prompts of independent random tokens; the same seed gives the same prompts."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def draw(self, num_tokens: int) -> Prompt:
        """Return one prompt of this many tokens."""
        return self._random.integers(_FIRST_TOKEN_ID, self._vocab_size, num_tokens).astype(np.uint32)

    def draw_many(self, count: int, num_tokens: int) -> Iterator[Prompt]:
        """Yield prompts of this many tokens each."""
        for _ in range(count):
            yield self.draw(num_tokens)
