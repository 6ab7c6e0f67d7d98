"""Writes the responses of a generation for the gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from google.protobuf.message import Message

from radixkv.api.result import FinishReason, GenerateResult, TokenLogprobs, Usage
from radixkv.gateway import vllm_engine_pb2
from radixkv.service.server.servicers.response_writer import PIECE_LOGPROBS, ResponseWriter, num_logprobs, row_slices
from radixkv.service.token_ids import length_head

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_ABORTED = "abort"


def chunk_response(token_ids: Sequence[int], usage: Usage, index: int) -> vllm_engine_pb2.GenerateResponse:
    """Write new tokens of a streamed completion, without log probabilities."""
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
    """Write the end of a completion, without log probabilities.

    Args:
        result: the completion.
        start: number of its tokens that have been sent before.
        index: index of the completion.
        matched_stop: the stop string that ended it, or empty.
        has_stop_token: whether a completion that was not ended by a stop string ends with a stop token.
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
    """Write the end of a completion that the gateway aborted, without its unsent tokens."""
    complete = vllm_engine_pb2.GenerateComplete(
        finish_reason=_ABORTED, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, index=index
    )
    return vllm_engine_pb2.GenerateResponse(complete=complete)


async def add_logprobs(
    writer: ResponseWriter,
    response: vllm_engine_pb2.GenerateResponse,
    logprobs: Sequence[TokenLogprobs],
    prompt: bytes,
    prompt_logprobs: Sequence[TokenLogprobs],
) -> vllm_engine_pb2.GenerateResponse | bytes:
    """Add log probabilities to a response.

    Args:
        writer: serializes large responses.
        response: the response, complete except for log probabilities.
        logprobs: one entry per token of the response; further entries are ignored. Empty if not requested.
        prompt: the tokens of the prompt.
        prompt_logprobs: one entry per prompt token except the first; empty if this response must not have them.

    Returns:
        The response, as bytes if it is large.
    """
    name = response.WhichOneof("response")
    body = getattr(response, str(name))  # the chunk or the complete completion
    token_ids = body.token_ids if name == "chunk" else body.output_ids
    pieces_of = {
        body.OUTPUT_LOGPROBS_FIELD_NUMBER: _output_pieces(token_ids, logprobs),
        body.INPUT_LOGPROBS_FIELD_NUMBER: _prompt_pieces(prompt, prompt_logprobs),
    }
    if num_logprobs(logprobs) + num_logprobs(prompt_logprobs) > PIECE_LOGPROBS:
        return await writer.join(_nested_pieces(response.DESCRIPTOR.fields_by_name[name].number, body, pieces_of))
    for piece in pieces_of[body.OUTPUT_LOGPROBS_FIELD_NUMBER]:
        body.output_logprobs.MergeFrom(piece)
    for piece in pieces_of[body.INPUT_LOGPROBS_FIELD_NUMBER]:
        body.input_logprobs.MergeFrom(piece)
    return response


def _nested_pieces(
    body_field_number: int, body: Message, pieces_of: Mapping[int, Iterator[Message]]
) -> Iterator[bytes]:
    """Serialize a response: the field that contains `body`, and in it the message `body` and the log probabilities."""
    serialized = [body.SerializeToString()]
    for field_number, messages in pieces_of.items():
        pieces = [message.SerializeToString() for message in messages]
        if pieces:
            serialized += [length_head(field_number, sum(map(len, pieces))), *pieces]
    yield length_head(body_field_number, sum(map(len, serialized)))
    yield from serialized


def _output_pieces(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Iterator[vllm_engine_pb2.OutputLogProbs]:
    """Yield pieces of the log probabilities of the output: serialized and concatenated, they are one message."""
    for row_slice in row_slices(logprobs):
        rows = logprobs[row_slice][: max(0, len(token_ids) - row_slice.start)]
        if rows:
            yield vllm_engine_pb2.OutputLogProbs(
                token_logprobs=[each.logprob for each in rows],
                token_ids=token_ids[row_slice],
                top_logprobs=_top_messages(rows),
            )


def _prompt_pieces(tokens: bytes, logprobs: Sequence[TokenLogprobs]) -> Iterator[vllm_engine_pb2.InputLogProbs]:
    """Yield pieces of the log probabilities of the prompt, as `_output_pieces` does. The first token has none."""
    if not logprobs:
        return
    yield vllm_engine_pb2.InputLogProbs(
        token_logprobs=[vllm_engine_pb2.InputTokenLogProb()],
        token_ids=np.frombuffer(tokens, dtype="<u4").tolist(),
        top_logprobs=[vllm_engine_pb2.TopLogProbs()],
    )
    for row_slice in row_slices(logprobs):
        rows = logprobs[row_slice]
        yield vllm_engine_pb2.InputLogProbs(
            token_logprobs=[vllm_engine_pb2.InputTokenLogProb(value=each.logprob) for each in rows],
            top_logprobs=_top_messages(rows),
        )


def _top_messages(logprobs: Sequence[TokenLogprobs]) -> list[vllm_engine_pb2.TopLogProbs]:
    return [
        vllm_engine_pb2.TopLogProbs(
            values=[logprob for _, logprob in each.top], token_ids=[token_id for token_id, _ in each.top]
        )
        for each in logprobs
    ]
