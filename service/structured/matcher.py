"""Token masks of constrained completions, computed by llguidance."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits

from radixkv.errors import InvalidRequest
from radixkv.service.structured.grammar_text import GrammarText, one_line_reason
from radixkv.service.structured.vocabulary import Vocabulary

# Computing a token mask delays all requests of the step. A request whose mask takes longer is refused.
MAX_MASK_S = 1.0  # CPU time

_WORD_BITS = 32
_LIMITS = LLParserLimits(verbose_errors=False)  # otherwise error messages contain tokens of the completion
_SILENT = 0


class GrammarConstraint:
    """A compiled grammar for any number of completions.

    Args:
        text: the grammar as the caller wrote it.
        vocabulary: the model's tokens.
        clock: CPU seconds of the calling thread, so that no request is refused because the machine is busy.

    Raises:
        InvalidRequest: the grammar is not valid, no completion can follow it, or its first token mask takes too long.
            The message names the field and the reason.
    """

    def __init__(
        self, text: GrammarText, vocabulary: Vocabulary, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._field = text.field
        self._vocabulary = vocabulary
        self._clock = clock
        self._matcher = LLMatcher(vocabulary.tokens, text.lark(), limits=_LIMITS, log_level=_SILENT)
        if self._matcher.is_error():
            reason = one_line_reason(self._matcher.get_error())
            raise InvalidRequest(f"{self._field}: llguidance can't use it: {reason}")
        first = self.start(frozenset())
        if first.is_finished:
            raise InvalidRequest(f"{self._field}: it allows no token at all")
        first.allowed()

    def start(self, stop_token_ids: Set[int]) -> GrammarMatcher:
        """Return a matcher for a new completion; see `radixkv.api.constraint`."""
        end_token_ids = np.array(sorted(stop_token_ids & self._vocabulary.without_text), dtype=np.int64)
        return GrammarMatcher(
            self._matcher.deep_copy(), end_token_ids, self._vocabulary.vocab_size, self._field, self._clock
        )


class GrammarMatcher:
    """Matches one completion; see `radixkv.api.constraint`.

    Args:
        matcher: llguidance's matcher at the start of the completion; owned by this object.
        end_token_ids: tokens without text that end the completion, int64.
        vocab_size: number of the model's tokens, which is llguidance's id for the end.
        field: name of the request's field, for error messages.
        clock: CPU seconds of the calling thread, so that no request is refused because the machine is busy.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_token_ids: npt.NDArray[np.int64],
        vocab_size: int,
        field: str,
        clock: Callable[[], float],
    ) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._vocab_size = vocab_size
        self._field = field
        self._clock = clock
        self._mask: tuple[npt.NDArray[np.bool_], bool] | InvalidRequest | None = None

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return the mask of tokens that may follow, bool `[vocab_size]`.

        Raises:
            InvalidRequest: the mask cannot be computed, takes too long, or allows no token where the completion may not
                end.
        """
        result = self._cached_mask()
        if isinstance(result, InvalidRequest):
            raise result
        mask, _ = result
        return mask

    def accept(self, token_id: int) -> None:
        """Append the next token."""
        self._mask = None
        self._matcher.consume_token(token_id)

    @property
    def is_finished(self) -> bool:
        """Whether the completion is complete and no token with text may follow."""
        if self._matcher.is_error() or not self._matcher.is_accepting():
            return False
        if self._matcher.is_stopped():
            return True
        result = self._cached_mask()  # for some grammars, only the mask shows that no token with text may follow
        if isinstance(result, InvalidRequest):
            return False
        _, can_only_end = result
        return can_only_end

    def _cached_mask(self) -> tuple[npt.NDArray[np.bool_], bool] | InvalidRequest:
        """Return the mask and whether only the end may follow, or the error; computed once per token."""
        if self._mask is None:
            self._mask = self._compute_mask()
        return self._mask

    def _compute_mask(self) -> tuple[npt.NDArray[np.bool_], bool] | InvalidRequest:
        words = np.zeros(self._vocab_size // _WORD_BITS + 1, dtype="<u4")
        started_s = self._clock()
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            reason = one_line_reason(self._matcher.get_error())
            return InvalidRequest(f"{self._field}: its token mask can't be computed: {reason}")
        mask_s = self._clock() - started_s
        if mask_s > MAX_MASK_S:
            return InvalidRequest(
                f"{self._field}: expected one whose token mask takes at most {MAX_MASK_S:g} s, got {mask_s:.1f} s"
            )
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=self._vocab_size + 1).view(np.bool_)
        # Where a special token may follow, llguidance 1.9 always sets the bit for the end.
        allowed, can_end = bits[:-1], bool(bits[-1]) and self._matcher.is_accepting()
        can_only_end = can_end and not allowed.any()
        if can_end:
            allowed[self._end_token_ids] = True
        elif not allowed.any():
            return InvalidRequest(
                f"{self._field}: it has a dead end: no token may follow, and the completion may not end"
            )
        return allowed, can_only_end
