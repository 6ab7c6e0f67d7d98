"""Finds out why the prompts of a trace are not reused. A trace has no tokens and no text, only ids of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.doctor.causes import MissCause
from radixkv.doctor.examination import Earlier
from radixkv.doctor.finding import Finding, GroupKey
from radixkv.doctor.prompt_log import LoggedPrompt, SegmentOf
from radixkv.explain.realignment import Tokens, num_equal_tokens

_SHORTER = 0.7
_HEAD_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class BlockExaminer:
    """Compares the block ids of a prompt with those of the prompt before it in its session.

    In most traces, the id of a block is a hash of the block and of everything before it, so ids after a difference are
    never equal again. Then the lost tokens are an upper bound: all tokens of the shorter prompt after the difference,
    without those that were reused.

    Attributes:
        tokens_per_id: tokens of a block.
    """

    tokens_per_id: int

    def examine(
        self,
        prompt: LoggedPrompt,
        ids: Tokens,
        num_cached: int,
        earlier: Sequence[Earlier],
        min_lost_tokens: int,
        segment_of: SegmentOf | None = None,
    ) -> Finding | None:
        """Return why a prompt could not reuse more of the previous prompt of its session.

        Returns:
            The finding; None if there is no previous prompt, the prompt continues it, or too few tokens were lost.

        Args:
            prompt: the prompt.
            ids: its blocks as numbers, uint32 `[num_ids]`.
            num_cached: number of reused blocks.
            earlier: earlier prompts; only the first one of the same session is compared.
            min_lost_tokens: losses of fewer tokens are not reported.
            segment_of: not used.
        """
        other = next((each for each in earlier if prompt.session and each.prompt.session == prompt.session), None)
        if other is None:
            return None
        start = num_equal_tokens(ids, other.tokens)
        num_others = other.tokens.size
        if start >= num_others - 1:  # the last block may only be longer now
            return None
        num_equal = _num_equal_again(ids[start:], other.tokens[start:])
        cause, num_lost = MissCause.REALIGNED, num_equal
        if not num_equal:
            num_lost = min(ids.size, num_others) - max(start, num_cached)
            if ids.size < _SHORTER * num_others:
                cause = MissCause.COMPACTED
            else:
                cause = MissCause.HEAD_CHANGED if start <= _HEAD_SHARE * num_others else MissCause.MIDDLE_CHANGED
        num_lost_tokens = max(0, min(num_lost * self.tokens_per_id, prompt.num_tokens - 1))
        if num_lost_tokens < min_lost_tokens:
            return None
        position = start * self.tokens_per_id
        return Finding(GroupKey(cause), position, num_lost_tokens, is_bound=not num_equal)


def _num_equal_again(ids: Tokens, others: Tokens) -> int:
    """Return the length of the first run of ids that the other prompt also has."""
    positions = {each: index for index, each in reversed(list(enumerate(others.tolist())))}
    for index, each in enumerate(ids.tolist()):
        if each in positions:
            return num_equal_tokens(ids[index:], others[positions[each] :])
    return 0
