"""Recognizes tool calls in completions, so that the cache knows what their session waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.servicers.messages import MAX_NAME_CHARS
from radixkv.service.text.tokenizer import Tokenizer


async def with_tool_calls(tokenizer: ModelTokenizer, begin: str, sampling: Sampling) -> Sampling:
    """Return the options of a generation that recognizes tool calls by the text with which they begin.

    Args:
        tokenizer: the model's tokenizer, which is loaded on another thread.
        begin: the text; empty to change nothing.
        sampling: the options.

    Raises:
        InvalidRequest: the text is too long, or the model has no tokenizer.
    """
    if not begin:
        return sampling
    if len(begin) > MAX_NAME_CHARS:
        raise InvalidRequest(f"tool_call_begin: expected at most {MAX_NAME_CHARS} characters, got {len(begin)}")
    loaded = await tokenizer.require_async("tool_call_begin", "the recognition of tool calls requires")
    return dataclasses.replace(sampling, is_tool_call=partial(_contains, loaded, begin, loaded.special_id(begin)))


def _contains(tokenizer: Tokenizer, begin: str, begin_id: int | None, token_ids: Sequence[int]) -> bool:
    return begin_id in token_ids if begin_id is not None else begin in tokenizer.decode(token_ids)
