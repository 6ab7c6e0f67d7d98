"""Writes the responses of a generation for the gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from google.protobuf.message import Message

from radixkv.api.result import FinishReason, GenerateResult, TokenLogprobs, Usage
from radixkv.gateway import vllm_engine_pb2
from radixkv.service.server.servicers.response_writer import PIECE_LOGPROBS, ResponseWriter, num_logprobs, runs
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
    part = getattr(response, str(name))
    token_ids = part.token_ids if name == "chunk" else part.output_ids
    pieces_of = {
        part.OUTPUT_LOGPROBS_FIELD_NUMBER: _output_pieces(token_ids, logprobs),
        part.INPUT_LOGPROBS_FIELD_NUMBER: _prompt_pieces(prompt, prompt_logprobs),
    }
    if num_logprobs(logprobs) + num_logprobs(prompt_logprobs) > PIECE_LOGPROBS:
        return await writer.join(_nested_pieces(response.DESCRIPTOR.fields_by_name[name].number, part, pieces_of))
    for piece in pieces_of[part.OUTPUT_LOGPROBS_FIELD_NUMBER]:
        part.output_logprobs.MergeFrom(piece)
    for piece in pieces_of[part.INPUT_LOGPROBS_FIELD_NUMBER]:
        part.input_logprobs.MergeFrom(piece)
    return response


def _nested_pieces(number: int, part: Message, pieces_of: Mapping[int, Iterator[Message]]) -> Iterator[bytes]:
    """Serialize the field `number` of a response: its length, the message `part`, and the log probabilities."""
    written = [part.SerializeToString()]
    for field_number, messages in pieces_of.items():
        pieces = [message.SerializeToString() for message in messages]
        written += [length_head(field_number, sum(map(len, pieces))), *pieces] if pieces else []
    yield length_head(number, sum(map(len, written)))
    yield from written


def _output_pieces(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Iterator[vllm_engine_pb2.OutputLogProbs]:
    """Yield messages whose serialized concatenation is one message."""
    for run in runs(logprobs):
        part_rows = logprobs[run][: max(0, len(token_ids) - run.start)]
        if part_rows:
            yield vllm_engine_pb2.OutputLogProbs(
                token_logprobs=[each.logprob for each in part_rows],
                token_ids=token_ids[run],
                top_logprobs=_top_messages(part_rows),
            )


def _prompt_pieces(tokens: bytes, logprobs: Sequence[TokenLogprobs]) -> Iterator[vllm_engine_pb2.InputLogProbs]:
    """Yield messages whose serialized concatenation is one message. The first prompt token has no log probability."""
    if not logprobs:
        return
    yield vllm_engine_pb2.InputLogProbs(
        token_logprobs=[vllm_engine_pb2.InputTokenLogProb()],
        token_ids=np.frombuffer(tokens, dtype="<u4").tolist(),
        top_logprobs=[vllm_engine_pb2.TopLogProbs()],
    )
    for run in runs(logprobs):
        part_rows = logprobs[run]
        yield vllm_engine_pb2.InputLogProbs(
            token_logprobs=[vllm_engine_pb2.InputTokenLogProb(value=each.logprob) for each in part_rows],
            top_logprobs=_top_messages(part_rows),
        )


def _top_messages(logprobs: Sequence[TokenLogprobs]) -> list[vllm_engine_pb2.TopLogProbs]:
    return [
        vllm_engine_pb2.TopLogProbs(
            values=[logprob for _, logprob in each.top], token_ids=[token_id for token_id, _ in each.top]
        )
        for each in logprobs
    ]
