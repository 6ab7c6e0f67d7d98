"""Writes tokens and answers as the gateway reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from radixkv.api.result import FinishReason, GenerateResult, TokenLogprobs, Usage
from radixkv.gateway import vllm_engine_pb2
from radixkv.service.server.generation.answer_writer import PIECE_NUMBERS, AnswerWriter, num_numbers, runs
from radixkv.service.token_ids import length_head

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_ABORTED = "abort"


def chunk_response(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    usage: Usage,
    index: int,
) -> vllm_engine_pb2.GenerateResponse:
    """Write new tokens of a streamed answer."""
    chunk = vllm_engine_pb2.GenerateStreamChunk(
        token_ids=token_ids,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=len(token_ids),
        cached_tokens=usage.cached_tokens,
        output_logprobs=_logprobs_message(token_ids, logprobs),
        index=index,
    )
    return vllm_engine_pb2.GenerateResponse(chunk=chunk)


def complete_response(
    result: GenerateResult,
    start: int,
    index: int,
    matched_stop: str = "",
    *,
    has_stop_token: bool = True,
) -> vllm_engine_pb2.GenerateResponse:
    """Write the end of an answer.

    Args:
        result: the answer.
        start: the number of its tokens that were written before.
        index: which of the answers it is.
        matched_stop: the string that ended it, or empty.
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


async def with_prompt_logprobs(
    writer: AnswerWriter,
    response: vllm_engine_pb2.GenerateResponse,
    tokens: bytes,
    logprobs: Sequence[TokenLogprobs],
) -> vllm_engine_pb2.GenerateResponse | bytes:
    """Add the log probabilities of a prompt to a part of an answer.

    Args:
        writer: writes what is large.
        response: the part, with all else.
        tokens: of the prompt.
        logprobs: one for each token but the first; empty if they were not asked for.

    Returns:
        The part; its bytes if it is large.
    """
    if num_numbers(logprobs) > PIECE_NUMBERS:
        return await writer.joined(_nested_pieces(response, tokens, logprobs))
    if logprobs:
        for piece in _prompt_pieces(tokens, logprobs):
            getattr(response, _part_of(response)).input_logprobs.MergeFrom(piece)
    return response


def _nested_pieces(
    response: vllm_engine_pb2.GenerateResponse, tokens: bytes, logprobs: Sequence[TokenLogprobs]
) -> Iterator[bytes]:
    """Write a part of an answer around the log probabilities of a prompt, whose bytes are counted before them."""
    name = _part_of(response)
    part = getattr(response, name)
    rest, rows = part.SerializeToString(), [piece.SerializeToString() for piece in _prompt_pieces(tokens, logprobs)]
    head = length_head(part.INPUT_LOGPROBS_FIELD_NUMBER, sum(map(len, rows)))
    number = response.DESCRIPTOR.fields_by_name[name].number
    yield length_head(number, len(rest) + len(head) + sum(map(len, rows))) + rest + head
    yield from rows


def _prompt_pieces(tokens: bytes, logprobs: Sequence[TokenLogprobs]) -> Iterator[vllm_engine_pb2.InputLogProbs]:
    """Write messages that, one behind the other, are one. Nothing is told of the first token."""
    yield vllm_engine_pb2.InputLogProbs(
        token_logprobs=[vllm_engine_pb2.InputTokenLogProb()],
        token_ids=np.frombuffer(tokens, dtype="<u4").tolist(),
        top_logprobs=[vllm_engine_pb2.TopLogProbs()],
    )
    for run in runs(logprobs):
        some = logprobs[run]
        yield vllm_engine_pb2.InputLogProbs(
            token_logprobs=[vllm_engine_pb2.InputTokenLogProb(value=each.logprob) for each in some],
            top_logprobs=_top_messages(some),
        )


def _part_of(response: vllm_engine_pb2.GenerateResponse) -> str:
    name: str | None = response.WhichOneof("response")
    assert name is not None, "a response is a chunk or complete"
    return name


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
