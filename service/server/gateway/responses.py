"""Writes tokens and answers as the gateway reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from google.protobuf.message import Message

from radixkv.api.result import FinishReason, GenerateResult, TokenLogprobs, Usage
from radixkv.gateway import vllm_engine_pb2
from radixkv.service.server.generation.answer_writer import PIECE_NUMBERS, AnswerWriter, num_numbers, runs
from radixkv.service.token_ids import length_head

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_ABORTED = "abort"


def chunk_response(
    token_ids: Sequence[int],
    usage: Usage,
    index: int,
) -> vllm_engine_pb2.GenerateResponse:
    """Write new tokens of a streamed answer, without log probabilities."""
    chunk = vllm_engine_pb2.GenerateStreamChunk(
        token_ids=token_ids,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=len(token_ids),
        cached_tokens=usage.cached_tokens,
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
    """Write the end of an answer, without log probabilities.

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


async def with_logprobs(
    writer: AnswerWriter,
    response: vllm_engine_pb2.GenerateResponse,
    logprobs: Sequence[TokenLogprobs],
    prompt: bytes,
    prompt_logprobs: Sequence[TokenLogprobs],
) -> vllm_engine_pb2.GenerateResponse | bytes:
    """Add log probabilities to a part of an answer.

    Args:
        writer: writes what is large.
        response: the part, with all else.
        logprobs: one for each of its tokens, and perhaps more; empty if they were not asked for.
        prompt: its tokens.
        prompt_logprobs: one for each of them but the first; empty if they do not come with this part.

    Returns:
        The part; its bytes if it is large.
    """
    name = response.WhichOneof("response")
    part = getattr(response, str(name))
    token_ids = part.token_ids if name == "chunk" else part.output_ids
    told = {
        part.OUTPUT_LOGPROBS_FIELD_NUMBER: _output_pieces(token_ids, logprobs),
        part.INPUT_LOGPROBS_FIELD_NUMBER: _prompt_pieces(prompt, prompt_logprobs),
    }
    if num_numbers(logprobs) + num_numbers(prompt_logprobs) > PIECE_NUMBERS:
        return await writer.joined(_nested_pieces(response.DESCRIPTOR.fields_by_name[name].number, part, told))
    for piece in told[part.OUTPUT_LOGPROBS_FIELD_NUMBER]:
        part.output_logprobs.MergeFrom(piece)
    for piece in told[part.INPUT_LOGPROBS_FIELD_NUMBER]:
        part.input_logprobs.MergeFrom(piece)
    return response


def _nested_pieces(number: int, part: Message, told: Mapping[int, Iterator[Message]]) -> Iterator[bytes]:
    """Write a part of an answer, the field `number`, around log probabilities, whose bytes are counted before them."""
    written = [part.SerializeToString()]
    for field_number, messages in told.items():
        pieces = [message.SerializeToString() for message in messages]
        written += [length_head(field_number, sum(map(len, pieces))), *pieces] if pieces else []
    yield length_head(number, sum(map(len, written)))
    yield from written


def _output_pieces(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Iterator[vllm_engine_pb2.OutputLogProbs]:
    """Write messages that, one behind the other, are one."""
    for run in runs(logprobs):
        some = logprobs[run][: max(0, len(token_ids) - run.start)]
        if some:
            yield vllm_engine_pb2.OutputLogProbs(
                token_logprobs=[each.logprob for each in some],
                token_ids=token_ids[run],
                top_logprobs=_top_messages(some),
            )


def _prompt_pieces(tokens: bytes, logprobs: Sequence[TokenLogprobs]) -> Iterator[vllm_engine_pb2.InputLogProbs]:
    """Write messages that, one behind the other, are one. Nothing is told of the first token."""
    if not logprobs:
        return
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


def _top_messages(logprobs: Sequence[TokenLogprobs]) -> list[vllm_engine_pb2.TopLogProbs]:
    return [
        vllm_engine_pb2.TopLogProbs(
            values=[logprob for _, logprob in each.top], token_ids=[token_id for token_id, _ in each.top]
        )
        for each in logprobs
    ]
