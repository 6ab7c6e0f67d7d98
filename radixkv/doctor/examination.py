"""Compares a prompt with earlier ones of its namespace, and finds out why it was not reused further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixkv.doctor.causes import MissCause, Sides, cause_of
from radixkv.doctor.finding import Finding, GroupKey, Replacement, Sample, Side, place_of
from radixkv.doctor.prompt_log import LoggedPrompt
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
    """One of the differences between a prompt and an earlier one.

    Attributes:
        start: where it begins in the prompt.
        ours, theirs: the tokens of the prompt and of the earlier one from the difference on.
        realignment: where both are equal again; None if they are not.
        decoder: decodes tokens at the difference; None without a tokenizer.
        is_permuted: whether only the order of the tokens differs.
    """

    start: int
    ours: Tokens
    theirs: Tokens
    realignment: Realignment | None
    decoder: Decoder | None
    is_permuted: bool = False

    @property
    def spans(self) -> tuple[int | None, int | None]:
        """How many tokens differ in the prompt and in the earlier one; None if both are not equal again."""
        return (
            (None, None) if self.realignment is None else (self.realignment.prompt_span, self.realignment.branch_span)
        )

    def num_lost(self, num_cached: int) -> int:
        """Return how many tokens would be reused without the difference, apart from the last one of the prompt."""
        if self.realignment is None:
            return 0
        end = self.start + self.realignment.prompt_span
        start = self.start if self.is_permuted else end
        num_tokens = self.start + self.ours.size
        return max(0, min(end + self.realignment.equal_tokens, num_tokens - 1) - max(start, num_cached))

    def likeness(self, num_cached: int) -> int:
        """Return the number of lost tokens minus the number of differing tokens, unless only the order differs."""
        if self.realignment is None or self.is_permuted:
            return self.num_lost(num_cached)
        return self.num_lost(num_cached) - self.realignment.prompt_span

    def replacements(self) -> list[Replacement]:
        """Return what makes the prompt equal to the earlier one here."""
        if self.realignment is None:
            return []
        theirs = self.theirs[: self.realignment.branch_span]
        return [Replacement(self.start, self.start + self.realignment.prompt_span, theirs.tobytes())]


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
        self, prompt: LoggedPrompt, tokens: Tokens, num_cached: int, earlier: Sequence[Earlier], min_lost_tokens: int
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
        """
        compared: list[tuple[int, Earlier, list[_Difference]]] = []  # by likeness
        for other in earlier:
            start = num_equal_tokens(tokens, other.tokens)
            if start < min(tokens.size, other.tokens.size):
                differences = self._differences(tokens, other.tokens, start)
                compared.append((sum(each.likeness(num_cached) for each in differences), other, differences))
        compared.sort(key=lambda each: each[0], reverse=True)
        vague_finding: Finding | None = None
        for likeness, other, differences in compared:
            if vague_finding is not None and likeness < _MIN_LIKENESS * compared[0][0]:
                break
            finding = self._finding(prompt, tokens, num_cached, other, differences)
            if finding is not None and finding.lost_tokens < min_lost_tokens:
                finding = None
            if finding is not None and finding.key.cause is not MissCause.REPLACED:
                return finding
            vague_finding = vague_finding or finding
        return vague_finding

    def _differences(self, tokens: Tokens, other: Tokens, start: int) -> list[_Difference]:
        """Return the differences between two prompts that are equal up to `start`, in order."""
        differences: list[_Difference] = []
        ours, theirs = tokens[start:], other[start:]
        while min(ours.size, theirs.size) > 0 and len(differences) < self.max_differences:
            start = tokens.size - ours.size
            decoder = None if self.decode is None else Decoder(self.decode, tokens, start)
            realignment = realign(ours, theirs)
            if realignment is None:
                differences.append(_Difference(start, ours, theirs, None, decoder))
                break
            text_of = None if decoder is None else decoder.decode_with_context
            realignment = end_of_reordering(ours, theirs, realignment, text_of)
            prompt_span, branch_span, num_equal = realignment
            is_permuted = has_same_tokens(ours[:prompt_span], theirs[:branch_span])
            differences.append(_Difference(start, ours, theirs, realignment, decoder, is_permuted))
            ours, theirs = ours[prompt_span + num_equal :], theirs[branch_span + num_equal :]
        return differences

    def _finding(
        self,
        prompt: LoggedPrompt,
        tokens: Tokens,
        num_cached: int,
        other: Earlier,
        differences: Sequence[_Difference],
    ) -> Finding | None:
        first, later = differences[0], differences[1:]
        cause_and_pattern = _cause(prompt, other, first)
        if cause_and_pattern is None and later:  # the tokens after the first difference may be equal by chance
            first, later = _merge_differences(differences)
            cause_and_pattern = _cause(prompt, other, first)
        if cause_and_pattern is None:
            return None
        num_lost = first.num_lost(num_cached)
        if first.realignment is None:  # a compacted conversation, which has no equal tokens after the difference
            num_lost = max(0, tokens.size - 1 - max(num_cached, first.start))
        replacements = first.replacements()
        for difference in later:
            if difference.realignment is None or _cause(prompt, other, difference) != cause_and_pattern:
                break
            num_lost += difference.num_lost(num_cached)
            replacements += difference.replacements()
        cause, pattern = cause_and_pattern
        segment = _segment_at(prompt, first.start)
        return Finding(
            GroupKey(cause, place_of(first.start, segment), pattern),
            first.start,
            num_lost,
            segment,
            tuple(replacements),
            sample=self._sample(prompt, tokens, other, first),
            is_bound=first.realignment is None,
        )

    def _sample(self, prompt: LoggedPrompt, tokens: Tokens, other: Earlier, difference: _Difference) -> Sample:
        start, (prompt_span, earlier_span) = difference.start, difference.spans
        before_ids = tokens[max(0, start - NUM_SHOWN_BEFORE) : start].tolist()
        return Sample(
            tuple(before_ids),
            "" if self.decode is None else self.decode(before_ids),
            _side(difference.ours, prompt_span, difference.decoder),
            _side(difference.theirs, earlier_span, difference.decoder),
            prompt.where,
            other.prompt.where,
        )


def _cause(prompt: LoggedPrompt, other: Earlier, difference: _Difference) -> tuple[MissCause, str] | None:
    """Return the cause of a difference and its pattern; see `cause_of`."""
    start, ours, theirs, realignment, decoder, _ = difference
    prompt_span, earlier_span = difference.spans
    sides = Sides(
        _text(decoder, ours, prompt_span),
        _text(decoder, theirs, earlier_span),
        _segment_at(prompt, start),
        is_same_session=bool(prompt.session) and prompt.session == other.prompt.session,
        num_prompt_tokens=start + ours.size,
        num_branch_tokens=other.tokens.size,
    )
    return cause_of(compare(ours, theirs, realignment, is_first=not start, decoder=decoder), sides)


def _segment_at(prompt: LoggedPrompt, position: int) -> str:
    return "" if prompt.segment_of is None else prompt.segment_of(position)


def _merge_differences(differences: Sequence[_Difference]) -> tuple[_Difference, Sequence[_Difference]]:
    """Merge all differences before the longest equal run. Returns the merged one, and the differences after the run."""
    runs = [0 if each.realignment is None else each.realignment.equal_tokens for each in differences]
    index = runs.index(max(runs))
    first, last = differences[0], differences[index]
    realignment = last.realignment
    if realignment is not None:
        prompt_span = first.ours.size - last.ours.size + realignment.prompt_span
        branch_span = first.theirs.size - last.theirs.size + realignment.branch_span
        realignment = Realignment(prompt_span, branch_span, realignment.equal_tokens)
    return first._replace(realignment=realignment, is_permuted=False), differences[index + 1 :]


def _text(decoder: Decoder | None, tokens: Tokens, span: int | None) -> str:
    """Return the beginning of the text of a span; `None` is a span without an end."""
    num_tokens = _MAX_TEXT_TOKENS if span is None else min(span, _MAX_TEXT_TOKENS)
    return "" if decoder is None else decoder.decode_without_context(tokens[:num_tokens])


def _side(tokens: Tokens, span: int | None, decoder: Decoder | None) -> Side:
    excerpt = excerpt_of(tokens, span, decoder)
    return Side(excerpt.token_ids, excerpt.num_different, excerpt.different_text, excerpt.equal_text, span)


def as_uint32(tokens: bytes) -> Tokens:
    """Return tokens as numbers, without a copy."""
    return np.frombuffer(tokens, "<u4")
