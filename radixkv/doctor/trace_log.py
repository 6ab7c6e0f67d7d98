"""The prompts of a trace as a log: one number per block, since a trace has no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.doctor.prompt_log import LoggedPrompt, PromptLog
from radixkv.errors import ConfigError
from radixkv.namespace import Namespace
from radixkv.planning.trace import TraceRequest


def trace_log(requests: Sequence[TraceRequest]) -> PromptLog:
    """Return a log with the blocks of a trace.

    Raises:
        ConfigError: the requests have blocks of different sizes.
    """
    sizes = {each.tokens_per_id for each in requests}
    if len(sizes) != 1:
        raise ConfigError(f"trace: expected blocks of one size, got {', '.join(map(str, sorted(sizes)))} tokens")
    log = PromptLog(sizes.pop())
    numbers_by_id: dict[int, int] = {}
    for index, each in enumerate(requests):
        num_whole_blocks = each.input_length // each.tokens_per_id
        # The last id is the first one of the answer: that of the block in which the prompt ends, as the next turn
        # contains it; or that of the block after the prompt, if the prompt ends with a whole block.
        ids = each.hash_ids if not each.output_ids else (*each.hash_ids[:num_whole_blocks], *each.output_ids[:1])
        prompt = LoggedPrompt(
            f"request {index + 1}", each.input_length, Namespace("trace"), each.session, each.timestamp_ms / 1000
        )
        log.add(prompt, _numbers_of(ids, numbers_by_id), _numbers_of(each.output_ids[1:], numbers_by_id))
    return log


def _numbers_of(ids: Sequence[int], numbers_by_id: dict[int, int]) -> list[int]:
    """Return the numbers of some ids. New ids get the next numbers."""
    return [numbers_by_id.setdefault(each, len(numbers_by_id)) for each in ids]
