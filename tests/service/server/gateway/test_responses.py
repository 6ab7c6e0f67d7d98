"""Tokens and final responses for the gateway."""

import asyncio
import dataclasses

import numpy as np
import pytest

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.miss_reason import MissReason
from radixkv.api.result import FinishReason, GenerateResult, Timing, TokenLogprobs, Usage
from radixkv.gateway.vllm_engine_pb2 import InputLogProbs, InputTokenLogProb, OutputLogProbs, TopLogProbs
from radixkv.service.server.gateway.responses import (
    aborted_response,
    add_logprobs,
    chunk_response,
    complete_response,
)
from radixkv.service.server.servicers.response_writer import PIECE_LOGPROBS, ResponseWriter

USAGE = Usage(10, 6, 4, 4, 3)
LOGPROBS = tuple(TokenLogprobs(-0.5 * token, ((token, -0.5), (9, -1.5))) for token in (1, 2, 3))


def result(reason=FinishReason.LENGTH):
    return GenerateResult("r", USAGE, (1, 2, 3), reason, MissReason.NONE, Timing(1, 2, 3, 6), None)


def with_logprobs(response, logprobs=(), prompt=(), prompt_logprobs=()):
    """Return a response with log probabilities: a message if they are few, and the bytes of one if they are many."""
    tokens = np.array(prompt, "<u4").tobytes()
    return asyncio.run(add_logprobs(ResponseWriter(), response, logprobs, tokens, prompt_logprobs))


def as_message(written, message_class):
    return message_class.FromString(written) if isinstance(written, bytes) else written


def test_a_chunk_counts_its_own_tokens():
    chunk = chunk_response([4, 5], USAGE, 2).chunk
    assert (list(chunk.token_ids), chunk.prompt_tokens, chunk.completion_tokens) == ([4, 5], 10, 2)
    assert (chunk.cached_tokens, chunk.index, chunk.HasField("output_logprobs")) == (6, 2, False)


def test_a_whole_answer_has_all_tokens_and_counts():
    complete = complete_response(result(), 0, 1).complete
    assert (list(complete.output_ids), complete.finish_reason, complete.index) == ([1, 2, 3], "length", 1)
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (10, 3, 6)
    assert complete.WhichOneof("matched_stop") is None


def test_a_final_response_has_only_the_tokens_that_were_not_sent_before():
    complete = with_logprobs(complete_response(result(), 2, 0), LOGPROBS[2:]).complete
    assert (list(complete.output_ids), complete.completion_tokens) == ([3], 1)
    assert list(complete.output_logprobs.token_ids) == [3]


def test_a_stop_names_its_token():
    complete = complete_response(result(FinishReason.STOP), 0, 0).complete
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 3)


def test_a_stop_that_was_sent_before_names_its_token_or_its_string():
    stopped = result(FinishReason.STOP)
    assert complete_response(stopped, 3, 0).complete.matched_token_id == 3
    assert not complete_response(stopped, 3, 0, has_stop_token=False).complete.HasField("matched_token_id")
    complete = complete_response(stopped, 3, 0, "end").complete
    assert (list(complete.output_ids), complete.finish_reason, complete.matched_stop_str) == ([], "stop", "end")


@pytest.mark.parametrize("top", [0, 2])
def test_each_token_has_a_row_of_logprobs(top):
    rows = tuple(TokenLogprobs(each.logprob, each.top[:top]) for each in LOGPROBS)
    logprobs = with_logprobs(complete_response(result(), 0, 0), rows).complete.output_logprobs
    assert (list(logprobs.token_logprobs), list(logprobs.token_ids)) == ([-0.5, -1.0, -1.5], [1, 2, 3])
    assert [list(row.token_ids) for row in logprobs.top_logprobs] == [[1, 9][:top], [2, 9][:top], [3, 9][:top]]
    assert [list(row.values) for row in logprobs.top_logprobs] == [[-0.5, -1.5][:top]] * 3


def test_an_aborted_answer_has_no_tokens():
    complete = aborted_response(10, 6, 3).complete
    assert (complete.finish_reason, list(complete.output_ids), complete.index) == ("abort", [], 3)
    assert (complete.prompt_tokens, complete.cached_tokens, complete.completion_tokens) == (10, 6, 0)


@pytest.mark.parametrize("num_rows", [2, 3, 2000])
@pytest.mark.parametrize("is_chunk", [False, True])
def test_rows_of_a_prompt_are_the_same_however_many_they_are(is_chunk, num_rows):
    rows = tuple(TokenLogprobs(-0.5 * number, ((number, -0.5), (9, -1.5))) for number in range(num_rows))
    response = chunk_response([4, 5], USAGE, 2) if is_chunk else complete_response(result(), 0, 2, "end")
    expected = type(response)()
    expected.CopyFrom(response)
    (expected.chunk if is_chunk else expected.complete).input_logprobs.CopyFrom(
        InputLogProbs(
            token_logprobs=[InputTokenLogProb(), *(InputTokenLogProb(value=row.logprob) for row in rows)],
            token_ids=range(num_rows + 1),
            top_logprobs=[
                TopLogProbs(),
                *(TopLogProbs(token_ids=[number, 9], values=[-0.5, -1.5]) for number in range(num_rows)),
            ],
        )
    )
    written = with_logprobs(response, (), range(num_rows + 1), rows)
    assert isinstance(written, bytes) is (num_rows == 2000)
    assert as_message(written, type(expected)) == expected


def test_a_response_without_rows_of_the_prompt_stays_as_it_is():
    assert not with_logprobs(chunk_response([4], USAGE, 0), (), [1, 2]).chunk.HasField("input_logprobs")


@pytest.mark.parametrize("num_tokens", [2, 2000])
@pytest.mark.parametrize("num_later", [0, 700])
@pytest.mark.parametrize("is_chunk", [False, True])
def test_rows_of_tokens_are_the_same_however_many_they_are_and_rows_of_later_tokens_are_left_out(
    is_chunk, num_later, num_tokens
):
    table = LogprobTable()
    table.extend(
        [TokenLogprobs(-0.5 * number, ((number, -0.5), (9, -1.5))) for number in range(num_tokens + num_later)]
    )
    token_ids = tuple(range(num_tokens))
    whole = dataclasses.replace(result(), token_ids=token_ids)
    response = chunk_response(token_ids, USAGE, 2) if is_chunk else complete_response(whole, 0, 2)
    expected = type(response)()
    expected.CopyFrom(response)
    (expected.chunk if is_chunk else expected.complete).output_logprobs.CopyFrom(
        OutputLogProbs(
            token_logprobs=[-0.5 * number for number in range(num_tokens)],
            token_ids=token_ids,
            top_logprobs=[TopLogProbs(token_ids=[number, 9], values=[-0.5, -1.5]) for number in range(num_tokens)],
        )
    )
    written = with_logprobs(response, table)
    is_large = 3 * (num_tokens + num_later) > PIECE_LOGPROBS  # a row has three log probabilities
    assert isinstance(written, bytes) is is_large
    assert as_message(written, type(expected)) == expected
