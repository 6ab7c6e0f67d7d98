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
from radixkv.explain.kinds import has_same_tokens, settled
from radixkv.explain.realignment import Realignment, Tokens, num_equal_tokens, realign

MAX_DIFFERENCES = 64
"""Differences between two prompts that are examined at most. A template may write something before each message."""

_NUM_SHOWN_TOKENS = 16
_NUM_SHOWN_BEFORE = 8
_MAX_TEXT_TOKENS = 512
_MIN_LIKENESS = 0.25


class Earlier(NamedTuple):
    """An earlier prompt, with its answer.

    Attributes:
        prompt: where it is from.
        tokens: uint32 `[num_tokens]`.
    """

    prompt: LoggedPrompt
    tokens: Tokens


class _Place(NamedTuple):
    """A difference: where it begins in both prompts, where they are equal again, and whether only the order differs."""

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
        """Return by how many tokens the two prompts are alike there, less those in which they differ."""
        if self.realignment is None or self.is_permuted:
            return self.num_lost(num_cached, num_tokens)
        return self.num_lost(num_cached, num_tokens) - self.realignment.prompt_span


@dataclass(frozen=True, slots=True)
class Examiner:
    """Finds the cause of the difference between prompts.

    Attributes:
        decode: returns the text of token ids; None without a tokenizer.
        max_differences: differences to each earlier prompt that are examined.
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
        """Return why a prompt could not reuse more of earlier ones; None if they have too little that it could reuse.

        Of several earlier prompts, the one that is most like it decides; but if that one only has other text in the
        same place, one that shows what kind of text this is.

        Args:
            prompt: the prompt.
            tokens: its tokens, uint32 `[num_tokens]`.
            num_cached: how many of them are reused.
            earlier: prompts to compare it with, the most likely one first.
            min_lost_tokens: losses of fewer tokens are not reported.
            segment_of: names the segment of a position in `tokens`; by default that of the prompt.
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
            found = self._finding(prompt, tokens, num_cached, other, places, segment_of)
            if found is not None and found.lost_tokens < min_lost_tokens:
                found = None
            if found is not None and found.key.cause is not MissCause.REPLACED:
                return found
            vague = vague or found
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
        found = self._cause(prompt, tokens, other, first, segment_of)
        if found is None and others:  # what is equal after it may be so by coincidence
            first, others = _merged(places)
            found = self._cause(prompt, tokens, other, first, segment_of)
        if found is None:
            return None
        num_lost = first.num_lost(num_cached, tokens.size)
        if first.realignment is None:  # of a compacted conversation that has nothing in common with it afterwards
            num_lost = max(0, tokens.size - 1 - max(num_cached, first.start))
        replacements = [*_replacements(first, other)]
        for place in others:
            if place.realignment is None or self._cause(prompt, tokens, other, place, segment_of) != found:
                break
            num_lost += place.num_lost(num_cached, tokens.size)
            replacements += _replacements(place, other)
        cause, pattern = found
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
        self, prompt: LoggedPrompt, tokens: Tokens, other: Earlier, place: _Place, segment_of: SegmentOf | None
    ) -> tuple[MissCause, str] | None:
        text_of = self._decoder(tokens, place.start)
        ours, theirs = tokens[place.start :], other.tokens[place.earlier_start :]
        found = compare(ours, theirs, place.realignment, is_first=not place.start, text_of=text_of)
        spans = _spans(found)
        sides = Sides(
            _text(text_of, ours, spans[0]),
            _text(text_of, theirs, spans[1]),
            segment_of(place.start) if segment_of else "",
            is_same_session=bool(prompt.session) and prompt.session == other.prompt.session,
            num_prompt_tokens=tokens.size,
            num_branch_tokens=other.tokens.size,
        )
        return cause_of(found, sides)

    def _differences(self, tokens: Tokens, other: Tokens, start: int) -> list[_Place]:
        """Return the differences between two prompts that are equal up to `start`, in order."""
        places: list[_Place] = []
        ours = theirs = start
        while min(tokens.size - ours, other.size - theirs) > 0 and len(places) < self.max_differences:
            found = realign(tokens[ours:], other[theirs:])
            if found is not None:
                text_of = self._decoder(tokens, ours)
                found = settled(tokens[ours:], other[theirs:], found, None if text_of is None else text_of.of)
            if found is None:
                places.append(_Place(ours, theirs, None))
                break
            spans = tokens[ours : ours + found.prompt_span], other[theirs : theirs + found.branch_span]
            places.append(_Place(ours, theirs, found, has_same_tokens(*spans)))
            ours += found.prompt_span + found.equal_tokens
            theirs += found.branch_span + found.equal_tokens
        return places

    def _decoder(self, tokens: Tokens, start: int) -> Decoder | None:
        if self.decode is None:
            return None
        return Decoder(self.decode, tokens[max(0, start - NUM_CONTEXT_TOKENS) : start].tolist())

    def _sample(self, prompt: LoggedPrompt, tokens: Tokens, other: Earlier, place: _Place) -> Sample:
        text_of = self._decoder(tokens, place.start)
        before = tokens[max(0, place.start - _NUM_SHOWN_BEFORE) : place.start].tolist()
        spans = (None, None) if place.realignment is None else place.realignment[:2]
        return Sample(
            tuple(before),
            "" if self.decode is None else self.decode(before),
            _side(tokens[place.start :], spans[0], text_of),
            _side(other.tokens[place.earlier_start :], spans[1], text_of),
            prompt.where,
            other.prompt.where,
        )


def _merged(places: Sequence[_Place]) -> tuple[_Place, Sequence[_Place]]:
    """Return one difference up to the longest run that is equal again, and the differences after that run."""
    runs = [0 if each.realignment is None else each.realignment.equal_tokens for each in places]
    index = runs.index(max(runs))
    first, last = places[0], places[index]
    found = last.realignment
    if found is not None:
        prompt_span = last.start + found.prompt_span - first.start
        branch_span = last.earlier_start + found.branch_span - first.earlier_start
        found = Realignment(prompt_span, branch_span, found.equal_tokens)
    return _Place(first.start, first.earlier_start, found), places[index + 1 :]


def _replacements(place: _Place, other: Earlier) -> list[Replacement]:
    found = place.realignment
    if found is None:
        return []
    theirs = other.tokens[place.earlier_start : place.earlier_start + found.branch_span]
    return [Replacement(place.start, place.start + found.prompt_span, theirs.tobytes())]


def _spans(found: Comparison) -> tuple[int, int]:
    return (_MAX_TEXT_TOKENS, _MAX_TEXT_TOKENS) if found.place is None else found.place[:2]


def _text(text_of: Decoder | None, tokens: Tokens, span: int) -> str:
    return "" if text_of is None else text_of.after(tokens[: min(span, _MAX_TEXT_TOKENS)].tolist())


def _side(tokens: Tokens, span: int | None, text_of: Decoder | None) -> Side:
    ids = tokens[:_NUM_SHOWN_TOKENS].tolist()
    num_different = len(ids) if span is None else min(span, len(ids))
    if text_of is None:
        return Side(tuple(ids), num_different, "", "", span)
    text, whole = text_of.after(ids[:num_different]), text_of.after(ids)
    return Side(tuple(ids), num_different, text, whole.removeprefix(text), span)


def uint32(tokens: bytes) -> Tokens:
    """Return tokens as numbers, without a copy."""
    return np.frombuffer(tokens, "<u4")
