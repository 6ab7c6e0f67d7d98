"""Reads a trace as a log, and finds out why its prompts are not reused.

A trace has no tokens and no text, only ids of blocks, which the log has in place of tokens.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.doctor.causes import MissCause
from radixkv.doctor.examination import Earlier
from radixkv.doctor.finding import Finding, GroupKey
from radixkv.doctor.prompt_log import LoggedPrompt, PromptLog
from radixkv.errors import ConfigError
from radixkv.explain.realignment import Tokens, num_equal_tokens
from radixkv.namespace import Namespace
from radixkv.planning.trace import TraceRequest

# A prompt with fewer blocks than this share of those of the previous prompt was compacted.
_MAX_COMPACTED_SHARE = 0.7
# A difference before this share of the previous prompt changes its head.
_HEAD_SHARE = 0.1


def trace_log(requests: Sequence[TraceRequest]) -> PromptLog:
    """Return a log with the blocks of a trace.

    Raises:
        ConfigError: the requests have blocks of different sizes.
    """
    sizes = {each.tokens_per_id for each in requests}
    if len(sizes) != 1:
        raise ConfigError(f"trace: expected blocks of one size, got {', '.join(map(str, sorted(sizes)))} tokens")
    log = PromptLog(sizes.pop())
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)  # a new id gets the next number
    for index, each in enumerate(requests):
        num_whole_blocks = each.input_length // each.tokens_per_id
        # The last id is the first one of the answer: that of the block in which the prompt ends, as the next turn
        # contains it; or that of the block after the prompt, if the prompt ends with a whole block.
        ids = each.hash_ids if not each.output_ids else (*each.hash_ids[:num_whole_blocks], *each.output_ids[:1])
        prompt = LoggedPrompt(
            f"request {index + 1}", each.input_length, Namespace("trace"), each.session, each.timestamp_ms / 1000
        )
        log.add(
            prompt, [numbers[block_id] for block_id in ids], [numbers[block_id] for block_id in each.output_ids[1:]]
        )
    return log


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
        self, prompt: LoggedPrompt, ids: Tokens, num_cached: int, earlier: Sequence[Earlier], min_lost_tokens: int
    ) -> Finding | None:
        """Return why a prompt could not reuse more of the previous prompt of its session.

        Args:
            prompt: the prompt.
            ids: its blocks as numbers, uint32 `[num_ids]`.
            num_cached: number of reused blocks.
            earlier: earlier prompts; only the first one of the same session is compared.
            min_lost_tokens: losses of fewer tokens are not reported.

        Returns:
            The finding; None if there is no previous prompt, the prompt continues it, or too few tokens were lost.
        """
        if not prompt.session:
            return None
        previous = next((each for each in earlier if each.prompt.session == prompt.session), None)
        if previous is None:
            return None
        start = num_equal_tokens(ids, previous.tokens)
        num_previous_ids = previous.tokens.size
        if start >= num_previous_ids - 1:  # the last block may only be longer now
            return None
        num_equal_ids = _num_equal_again(ids[start:], previous.tokens[start:])
        num_lost_ids = num_equal_ids
        cause = MissCause.REALIGNED
        if not num_equal_ids:
            num_lost_ids = min(ids.size, num_previous_ids) - max(start, num_cached)
            if ids.size < _MAX_COMPACTED_SHARE * num_previous_ids:
                cause = MissCause.COMPACTED
            elif start <= _HEAD_SHARE * num_previous_ids:
                cause = MissCause.HEAD_CHANGED
            else:
                cause = MissCause.MIDDLE_CHANGED
        num_lost_tokens = max(0, min(num_lost_ids * self.tokens_per_id, prompt.num_tokens - 1))
        if num_lost_tokens < min_lost_tokens:
            return None
        position = start * self.tokens_per_id
        return Finding(GroupKey(cause), position, num_lost_tokens, is_bound=not num_equal_ids)


def _num_equal_again(ids: Tokens, others: Tokens) -> int:
    """Return the length of the first run of ids that the other prompt also has."""
    first_positions: dict[int, int] = {}
    for position, block_id in enumerate(others.tolist()):
        first_positions.setdefault(block_id, position)
    for position, block_id in enumerate(ids.tolist()):
        if block_id in first_positions:
            return num_equal_tokens(ids[position:], others[first_positions[block_id] :])
    return 0
