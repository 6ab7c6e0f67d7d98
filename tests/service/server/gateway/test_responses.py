"""Tokens and answers as the gateway reads them."""

import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.api.result import FinishReason, GenerateResult, Timing, TokenLogprobs, Usage
from radixkv.service.server.gateway.responses import aborted_response, chunk_response, complete_response

USAGE = Usage(10, 6, 4, 4, 3)
LOGPROBS = tuple(TokenLogprobs(-0.5 * token, ((token, -0.5), (9, -1.5))) for token in (1, 2, 3))


def result(reason=FinishReason.LENGTH, logprobs=()):
    return GenerateResult("r", USAGE, (1, 2, 3), reason, MissReason.NONE, Timing(1, 2, 3, 6), None, logprobs)


def test_a_chunk_counts_its_own_tokens():
    chunk = chunk_response([4, 5], [], USAGE, 2).chunk
    assert (list(chunk.token_ids), chunk.prompt_tokens, chunk.completion_tokens) == ([4, 5], 10, 2)
    assert (chunk.cached_tokens, chunk.index, chunk.HasField("output_logprobs")) == (6, 2, False)


def test_a_whole_answer():
    complete = complete_response(result(), 0, 1).complete
    assert (list(complete.output_ids), complete.finish_reason, complete.index) == ([1, 2, 3], "length", 1)
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (10, 3, 6)
    assert complete.WhichOneof("matched_stop") is None


def test_the_rest_of_an_answer():
    complete = complete_response(result(logprobs=LOGPROBS), 2, 0).complete
    assert (list(complete.output_ids), complete.completion_tokens) == ([3], 1)
    assert list(complete.output_logprobs.token_ids) == [3]


def test_a_stop_names_its_token():
    complete = complete_response(result(FinishReason.STOP), 0, 0).complete
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 3)


def test_a_stop_that_was_told_before_names_its_token_or_its_string():
    stopped = result(FinishReason.STOP)
    assert complete_response(stopped, 3, 0).complete.matched_token_id == 3
    assert not complete_response(stopped, 3, 0, has_stop_token=False).complete.HasField("matched_token_id")
    complete = complete_response(stopped, 3, 0, "end").complete
    assert (list(complete.output_ids), complete.finish_reason, complete.matched_stop_str) == ([], "stop", "end")


@pytest.mark.parametrize("top", [0, 2])
def test_a_row_of_logprobs_for_each_token(top):
    rows = tuple(TokenLogprobs(each.logprob, each.top[:top]) for each in LOGPROBS)
    logprobs = complete_response(result(logprobs=rows), 0, 0).complete.output_logprobs
    assert (list(logprobs.token_logprobs), list(logprobs.token_ids)) == ([-0.5, -1.0, -1.5], [1, 2, 3])
    assert [list(row.token_ids) for row in logprobs.top_logprobs] == [[1, 9][:top], [2, 9][:top], [3, 9][:top]]
    assert [list(row.values) for row in logprobs.top_logprobs] == [[-0.5, -1.5][:top]] * 3


def test_an_aborted_answer_has_no_tokens():
    complete = aborted_response(10, 6, 3).complete
    assert (complete.finish_reason, list(complete.output_ids), complete.index) == ("abort", [], 3)
    assert (complete.prompt_tokens, complete.cached_tokens, complete.completion_tokens) == (10, 6, 0)
