"""Compares a prompt with earlier ones of its namespace, and finds out why it was not reused further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixkv.doctor.causes import MissCause, Sides, cause_of
from radixkv.doctor.finding import Finding, GroupKey, Replacement, Sample, Side, place_of
from radixkv.doctor.prompt_log import LoggedPrompt, SegmentOf
from radixkv.explain.comparison import NUM_CONTEXT_TOKENS, Comparison, Decode, Decoder, compare
from radixkv.explain.explanation import NUM_SHOWN_BEFORE, NUM_SHOWN_TOKENS
from radixkv.explain.kinds import end_of_reordering, has_same_tokens
from radixkv.explain.realignment import Realignment, Tokens, num_equal_tokens, realign

MAX_DIFFERENCES = 64
"""Maximum number of examined differences between two prompts. A template may write something before each message."""

_MAX_TEXT_TOKENS = 512
_MIN_LIKENESS = 0.25


class Earlier(NamedTuple):
    """An earlier prompt, with its answer.

    Attributes:
        prompt: the prompt without its tokens.
        tokens: tokens of the prompt and of its answer, uint32 `[num_tokens]`.
    """

    prompt: LoggedPrompt
    tokens: Tokens


class _Place(NamedTuple):
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
        compared: list[tuple[int, Earlier, list[_Place]]] = []
        for other in earlier:
            start = num_equal_tokens(tokens, other.tokens)
            if start < min(tokens.size, other.tokens.size):
                places = self._differences(tokens, other.tokens, start)
                compared.append((sum(each.likeness(num_cached, tokens.size) for each in places), other, places))
        compared.sort(key=lambda each: each[0], reverse=True)
        segment_of = segment_of or prompt.segment_of
        vague: Finding | None = None
        for likeness, other, places in compared:
            if vague is not None and likeness < _MIN_LIKENESS * compared[0][0]:
                break
            finding = self._finding(prompt, tokens, num_cached, other, places, segment_of)
            if finding is not None and finding.lost_tokens < min_lost_tokens:
                finding = None
            if finding is not None and finding.key.cause is not MissCause.REPLACED:
                return finding
            vague = vague or finding
        return vague

    def _finding(
        self,
        prompt: LoggedPrompt,
        tokens: Tokens,
        num_cached: int,
        other: Earlier,
        places: Sequence[_Place],
        segment_of: SegmentOf | None,
    ) -> Finding | None:
        first, others = places[0], places[1:]
        segment = segment_of(first.start) if segment_of else ""
        cause = self._cause(prompt, tokens, other, first, segment_of)
        if cause is None and others:  # the tokens after the first difference may be equal by chance
            first, others = _merge_places(places)
            cause = self._cause(prompt, tokens, other, first, segment_of)
        if cause is None:
            return None
        num_lost = first.num_lost(num_cached, tokens.size)
        if first.realignment is None:  # a compacted conversation, which has no equal tokens after the difference
            num_lost = max(0, tokens.size - 1 - max(num_cached, first.start))
        replacements = [*_replacements(first, other)]
        for place in others:
            if place.realignment is None or self._cause(prompt, tokens, other, place, segment_of) != cause:
                break
            num_lost += place.num_lost(num_cached, tokens.size)
            replacements += _replacements(place, other)
        kind, pattern = cause
        return Finding(
            GroupKey(kind, place_of(first.start, segment), pattern),
            first.start,
            num_lost,
            segment,
            tuple(replacements),
            sample=self._sample(prompt, tokens, other, first),
            is_bound=first.realignment is None,
        )

    def _cause(
        self, prompt: LoggedPrompt, tokens: Tokens, other: Earlier, place: _Place, segment_of: SegmentOf | None
    ) -> tuple[MissCause, str] | None:
        decoder = self._decoder(tokens, place.start)
        ours, theirs = tokens[place.start :], other.tokens[place.earlier_start :]
        comparison = compare(ours, theirs, place.realignment, is_first=not place.start, decoder=decoder)
        spans = _spans(comparison)
        sides = Sides(
            _text(decoder, ours, spans[0]),
            _text(decoder, theirs, spans[1]),
            segment_of(place.start) if segment_of else "",
            is_same_session=bool(prompt.session) and prompt.session == other.prompt.session,
            num_prompt_tokens=tokens.size,
            num_branch_tokens=other.tokens.size,
        )
        return cause_of(comparison, sides)

    def _differences(self, tokens: Tokens, other: Tokens, start: int) -> list[_Place]:
        """Return the differences between two prompts that are equal up to `start`, in order."""
        places: list[_Place] = []
        ours = theirs = start
        while min(tokens.size - ours, other.size - theirs) > 0 and len(places) < self.max_differences:
            end = realign(tokens[ours:], other[theirs:])
            if end is None:
                places.append(_Place(ours, theirs, None))
                break
            decoder = self._decoder(tokens, ours)
            end = end_of_reordering(
                tokens[ours:], other[theirs:], end, None if decoder is None else decoder.decode_with_context
            )
            spans = tokens[ours : ours + end.prompt_span], other[theirs : theirs + end.branch_span]
            places.append(_Place(ours, theirs, end, has_same_tokens(*spans)))
            ours += end.prompt_span + end.equal_tokens
            theirs += end.branch_span + end.equal_tokens
        return places

    def _decoder(self, tokens: Tokens, start: int) -> Decoder | None:
        if self.decode is None:
            return None
        return Decoder(self.decode, tokens[max(0, start - NUM_CONTEXT_TOKENS) : start].tolist())

    def _sample(self, prompt: LoggedPrompt, tokens: Tokens, other: Earlier, place: _Place) -> Sample:
        decoder = self._decoder(tokens, place.start)
        before = tokens[max(0, place.start - NUM_SHOWN_BEFORE) : place.start].tolist()
        spans = (None, None) if place.realignment is None else place.realignment[:2]
        return Sample(
            tuple(before),
            "" if self.decode is None else self.decode(before),
            _side(tokens[place.start :], spans[0], decoder),
            _side(other.tokens[place.earlier_start :], spans[1], decoder),
            prompt.where,
            other.prompt.where,
        )


def _merge_places(places: Sequence[_Place]) -> tuple[_Place, Sequence[_Place]]:
    """Merge all differences before the longest equal run. Returns the merged one, and the differences after the run."""
    runs = [0 if each.realignment is None else each.realignment.equal_tokens for each in places]
    index = runs.index(max(runs))
    first, last = places[0], places[index]
    end = last.realignment
    if end is not None:
        prompt_span = last.start + end.prompt_span - first.start
        branch_span = last.earlier_start + end.branch_span - first.earlier_start
        end = Realignment(prompt_span, branch_span, end.equal_tokens)
    return _Place(first.start, first.earlier_start, end), places[index + 1 :]


def _replacements(place: _Place, other: Earlier) -> list[Replacement]:
    end = place.realignment
    if end is None:
        return []
    theirs = other.tokens[place.earlier_start : place.earlier_start + end.branch_span]
    return [Replacement(place.start, place.start + end.prompt_span, theirs.tobytes())]


def _spans(comparison: Comparison) -> tuple[int, int]:
    return (_MAX_TEXT_TOKENS, _MAX_TEXT_TOKENS) if comparison.place is None else comparison.place[:2]


def _text(decoder: Decoder | None, tokens: Tokens, span: int) -> str:
    return "" if decoder is None else decoder.decode_without_context(tokens[: min(span, _MAX_TEXT_TOKENS)].tolist())


def _side(tokens: Tokens, span: int | None, decoder: Decoder | None) -> Side:
    ids = tokens[:NUM_SHOWN_TOKENS].tolist()
    num_different = len(ids) if span is None else min(span, len(ids))
    if decoder is None:
        return Side(tuple(ids), num_different, "", "", span)
    text, whole = decoder.decode_without_context(ids[:num_different]), decoder.decode_without_context(ids)
    return Side(tuple(ids), num_different, text, whole.removeprefix(text), span)


def uint32(tokens: bytes) -> Tokens:
    """Return tokens as numbers, without a copy."""
    return np.frombuffer(tokens, "<u4")
