"""Writes tokens and answers as the gateway reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.api.result import FinishReason, GenerateResult, TokenLogprobs, Usage
from radixkv.gateway import vllm_engine_pb2

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_ABORTED = "abort"


def chunk_response(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    usage: Usage,
    index: int,
    of_prompt: vllm_engine_pb2.InputLogProbs | None = None,
) -> vllm_engine_pb2.GenerateResponse:
    """Write new tokens of a streamed answer, with the log probabilities of the prompt if they come with it."""
    chunk = vllm_engine_pb2.GenerateStreamChunk(
        token_ids=token_ids,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=len(token_ids),
        cached_tokens=usage.cached_tokens,
        output_logprobs=_logprobs_message(token_ids, logprobs),
        input_logprobs=of_prompt,
        index=index,
    )
    return vllm_engine_pb2.GenerateResponse(chunk=chunk)


def complete_response(
    result: GenerateResult,
    start: int,
    index: int,
    matched_stop: str = "",
    of_prompt: vllm_engine_pb2.InputLogProbs | None = None,
    *,
    has_stop_token: bool = True,
) -> vllm_engine_pb2.GenerateResponse:
    """Write the end of an answer.

    Args:
        result: the answer.
        start: the number of its tokens that were written before.
        index: which of the answers it is.
        matched_stop: the string that ended it, or empty.
        of_prompt: log probabilities of the prompt, if they come with it.
        has_stop_token: whether an answer that stopped without a string did so at its last token.
    """
    token_ids = result.token_ids[start:]
    complete = vllm_engine_pb2.GenerateComplete(
        output_ids=token_ids,
        finish_reason=_FINISH_REASONS[result.finish_reason],
        prompt_tokens=result.usage.prompt_tokens,
        completion_tokens=len(token_ids),
        cached_tokens=result.usage.cached_tokens,
        output_logprobs=_logprobs_message(token_ids, result.logprobs[start:]),
        input_logprobs=of_prompt,
        index=index,
    )
    if matched_stop:
        complete.matched_stop_str = matched_stop
    elif has_stop_token and result.finish_reason is FinishReason.STOP:
        complete.matched_token_id = result.token_ids[-1]
    return vllm_engine_pb2.GenerateResponse(complete=complete)


def aborted_response(prompt_tokens: int, cached_tokens: int, index: int) -> vllm_engine_pb2.GenerateResponse:
    """Write the end of an answer that the gateway aborted; what was not told of it is dropped."""
    complete = vllm_engine_pb2.GenerateComplete(
        finish_reason=_ABORTED, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, index=index
    )
    return vllm_engine_pb2.GenerateResponse(complete=complete)


def prompt_logprobs_message(tokens: bytes, logprobs: Sequence[TokenLogprobs]) -> vllm_engine_pb2.InputLogProbs | None:
    """Write the log probabilities of a prompt's tokens; None if they were not asked for."""
    if not logprobs:
        return None
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[
            vllm_engine_pb2.InputTokenLogProb(),
            *(vllm_engine_pb2.InputTokenLogProb(value=each.logprob) for each in logprobs),
        ],
        token_ids=np.frombuffer(tokens, dtype="<u4").tolist(),
        top_logprobs=[vllm_engine_pb2.TopLogProbs(), *_top_messages(logprobs)],
    )


def _logprobs_message(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> vllm_engine_pb2.OutputLogProbs | None:
    if not logprobs:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[each.logprob for each in logprobs],
        token_ids=token_ids,
        top_logprobs=_top_messages(logprobs),
    )


def _top_messages(logprobs: Sequence[TokenLogprobs]) -> list[vllm_engine_pb2.TopLogProbs]:
    return [
        vllm_engine_pb2.TopLogProbs(
            values=[logprob for _, logprob in each.top], token_ids=[token_id for token_id, _ in each.top]
        )
        for each in logprobs
    ]
