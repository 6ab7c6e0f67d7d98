"""Compares a prompt with earlier ones of its namespace, and finds out why it was not reused further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixkv.doctor.causes import MissCause, Sides, cause_of
from radixkv.doctor.finding import Finding, GroupKey, Replacement, Sample, Side, place_of
from radixkv.doctor.prompt_log import LoggedPrompt, SegmentOf
from radixkv.explain.comparison import NUM_SHOWN_BEFORE, Decode, Decoder, compare, excerpt_of
from radixkv.explain.realignment import Realignment, Tokens, num_equal_tokens, realign
from radixkv.explain.reordering import end_of_reordering, has_same_tokens

MAX_DIFFERENCES = 64
"""Maximum number of examined differences between two prompts. A template may write something before each message."""

_MAX_TEXT_TOKENS = 512  # of each side of a difference whose text is searched for a cause
# After a vague finding, prompts with less than this share of the most similar prompt's likeness are not examined.
_MIN_LIKENESS = 0.25


class Earlier(NamedTuple):
    """An earlier prompt, with its answer.

    Attributes:
        prompt: the prompt without its tokens.
        tokens: tokens of the prompt and of its answer, uint32 `[num_tokens]`.
    """

    prompt: LoggedPrompt
    tokens: Tokens


class _Difference(NamedTuple):
    """A difference: where it begins in both prompts, where both are equal again, and whether only the order differs."""

    start: int
    earlier_start: int
    realignment: Realignment | None
    is_permuted: bool = False

    def num_lost(self, num_cached: int, num_tokens: int) -> int:
        """Return how many tokens would be reused without the difference, apart from the last one of the prompt."""
        if self.realignment is None:
            return 0
        end = self.start + self.realignment.prompt_span
        start = self.start if self.is_permuted else end
        return max(0, min(end + self.realignment.equal_tokens, num_tokens - 1) - max(start, num_cached))

    def likeness(self, num_cached: int, num_tokens: int) -> int:
        """Return the number of lost tokens minus the number of differing tokens, unless only the order differs."""
        if self.realignment is None or self.is_permuted:
            return self.num_lost(num_cached, num_tokens)
        return self.num_lost(num_cached, num_tokens) - self.realignment.prompt_span


@dataclass(frozen=True, slots=True)
class Examiner:
    """Finds the cause of the difference between prompts.

    Attributes:
        decode: returns the text of token ids; None without a tokenizer.
        max_differences: maximum number of examined differences to each earlier prompt.
    """

    decode: Decode | None
    max_differences: int = MAX_DIFFERENCES

    def examine(
        self,
        prompt: LoggedPrompt,
        tokens: Tokens,
        num_cached: int,
        earlier: Sequence[Earlier],
        min_lost_tokens: int,
        segment_of: SegmentOf | None = None,
    ) -> Finding | None:
        """Return why a prompt could not reuse more of earlier ones; None if the loss is too small or unexplained.

        The most similar earlier prompt that explains the loss decides. If it shows only that a passage was replaced, a
        less similar one that shows what kind of text was replaced takes precedence.

        Args:
            prompt: the prompt.
            tokens: its tokens, uint32 `[num_tokens]`.
            num_cached: number of reused tokens.
            earlier: earlier prompts to compare with; of equally similar ones, the first one decides.
            min_lost_tokens: losses of fewer tokens are not reported.
            segment_of: returns the name of the segment of a position in `tokens`; None for `prompt.segment_of`.
        """
        compared: list[tuple[int, Earlier, list[_Difference]]] = []  # by likeness
        for other in earlier:
            start = num_equal_tokens(tokens, other.tokens)
            if start < min(tokens.size, other.tokens.size):
                differences = self._differences(tokens, other.tokens, start)
                likeness = sum(each.likeness(num_cached, tokens.size) for each in differences)
                compared.append((likeness, other, differences))
        compared.sort(key=lambda each: each[0], reverse=True)
        segment_of = segment_of or prompt.segment_of
        vague_finding: Finding | None = None
        for likeness, other, differences in compared:
            if vague_finding is not None and likeness < _MIN_LIKENESS * compared[0][0]:
                break
            finding = self._finding(prompt, tokens, num_cached, other, differences, segment_of)
            if finding is not None and finding.lost_tokens < min_lost_tokens:
                finding = None
            if finding is not None and finding.key.cause is not MissCause.REPLACED:
                return finding
            vague_finding = vague_finding or finding
        return vague_finding

    def _finding(
        self,
        prompt: LoggedPrompt,
        tokens: Tokens,
        num_cached: int,
        other: Earlier,
        differences: Sequence[_Difference],
        segment_of: SegmentOf | None,
    ) -> Finding | None:
        first, later = differences[0], differences[1:]
        segment = segment_of(first.start) if segment_of else ""
        cause_and_pattern = self._cause(prompt, tokens, other, first, segment_of)
        if cause_and_pattern is None and later:  # the tokens after the first difference may be equal by chance
            first, later = _merge_differences(differences)
            cause_and_pattern = self._cause(prompt, tokens, other, first, segment_of)
        if cause_and_pattern is None:
            return None
        num_lost = first.num_lost(num_cached, tokens.size)
        if first.realignment is None:  # a compacted conversation, which has no equal tokens after the difference
            num_lost = max(0, tokens.size - 1 - max(num_cached, first.start))
        replacements = _replacements(first, other)
        for difference in later:
            if difference.realignment is None:
                break
            if self._cause(prompt, tokens, other, difference, segment_of) != cause_and_pattern:
                break
            num_lost += difference.num_lost(num_cached, tokens.size)
            replacements += _replacements(difference, other)
        cause, pattern = cause_and_pattern
        return Finding(
            GroupKey(cause, place_of(first.start, segment), pattern),
            first.start,
            num_lost,
            segment,
            tuple(replacements),
            sample=self._sample(prompt, tokens, other, first),
            is_bound=first.realignment is None,
        )

    def _cause(
        self,
        prompt: LoggedPrompt,
        tokens: Tokens,
        other: Earlier,
        difference: _Difference,
        segment_of: SegmentOf | None,
    ) -> tuple[MissCause, str] | None:
        """Return the cause of a difference and its pattern; see `cause_of`."""
        start, realignment = difference.start, difference.realignment
        decoder = self._decoder(tokens, start)
        ours, theirs = tokens[start:], other.tokens[difference.earlier_start :]
        comparison = compare(ours, theirs, realignment, is_first=not start, decoder=decoder)
        sides = Sides(
            _text(decoder, ours, _MAX_TEXT_TOKENS if realignment is None else realignment.prompt_span),
            _text(decoder, theirs, _MAX_TEXT_TOKENS if realignment is None else realignment.branch_span),
            segment_of(start) if segment_of else "",
            is_same_session=bool(prompt.session) and prompt.session == other.prompt.session,
            num_prompt_tokens=tokens.size,
            num_branch_tokens=other.tokens.size,
        )
        return cause_of(comparison, sides)

    def _differences(self, tokens: Tokens, other: Tokens, start: int) -> list[_Difference]:
        """Return the differences between two prompts that are equal up to `start`, in order."""
        differences: list[_Difference] = []
        other_start = start
        while min(tokens.size - start, other.size - other_start) > 0 and len(differences) < self.max_differences:
            ours, theirs = tokens[start:], other[other_start:]
            realignment = realign(ours, theirs)
            if realignment is None:
                differences.append(_Difference(start, other_start, None))
                break
            decoder = self._decoder(tokens, start)
            decode = None if decoder is None else decoder.decode_with_context
            realignment = end_of_reordering(ours, theirs, realignment, decode)
            is_permuted = has_same_tokens(ours[: realignment.prompt_span], theirs[: realignment.branch_span])
            differences.append(_Difference(start, other_start, realignment, is_permuted))
            start += realignment.prompt_span + realignment.equal_tokens
            other_start += realignment.branch_span + realignment.equal_tokens
        return differences

    def _decoder(self, tokens: Tokens, start: int) -> Decoder | None:
        return None if self.decode is None else Decoder(self.decode, tokens, start)

    def _sample(self, prompt: LoggedPrompt, tokens: Tokens, other: Earlier, difference: _Difference) -> Sample:
        start, realignment = difference.start, difference.realignment
        decoder = self._decoder(tokens, start)
        before_ids = tokens[max(0, start - NUM_SHOWN_BEFORE) : start].tolist()
        return Sample(
            tuple(before_ids),
            "" if self.decode is None else self.decode(before_ids),
            _side(tokens[start:], None if realignment is None else realignment.prompt_span, decoder),
            _side(
                other.tokens[difference.earlier_start :],
                None if realignment is None else realignment.branch_span,
                decoder,
            ),
            prompt.where,
            other.prompt.where,
        )


def _merge_differences(differences: Sequence[_Difference]) -> tuple[_Difference, Sequence[_Difference]]:
    """Merge all differences before the longest equal run. Returns the merged one, and the differences after the run."""
    runs = [0 if each.realignment is None else each.realignment.equal_tokens for each in differences]
    index = runs.index(max(runs))
    first, last = differences[0], differences[index]
    realignment = last.realignment
    if realignment is not None:
        prompt_span = last.start + realignment.prompt_span - first.start
        branch_span = last.earlier_start + realignment.branch_span - first.earlier_start
        realignment = Realignment(prompt_span, branch_span, realignment.equal_tokens)
    return _Difference(first.start, first.earlier_start, realignment), differences[index + 1 :]


def _replacements(difference: _Difference, other: Earlier) -> list[Replacement]:
    start, earlier_start, realignment, _ = difference
    if realignment is None:
        return []
    theirs = other.tokens[earlier_start : earlier_start + realignment.branch_span]
    return [Replacement(start, start + realignment.prompt_span, theirs.tobytes())]


def _text(decoder: Decoder | None, tokens: Tokens, span: int) -> str:
    return "" if decoder is None else decoder.decode_without_context(tokens[: min(span, _MAX_TEXT_TOKENS)])


def _side(tokens: Tokens, span: int | None, decoder: Decoder | None) -> Side:
    excerpt = excerpt_of(tokens, span, decoder)
    return Side(excerpt.token_ids, excerpt.num_different, excerpt.different_text, excerpt.equal_text, span)


def as_uint32(tokens: bytes) -> Tokens:
    """Return tokens as numbers, without a copy."""
    return np.frombuffer(tokens, "<u4")
