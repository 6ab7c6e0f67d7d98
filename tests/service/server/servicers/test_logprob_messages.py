"""Responses with log probabilities: as messages if there are few, and as equivalent bytes if there are many."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest

from radixkv.api.logprob_table import LogprobRows, LogprobTable
from radixkv.api.result import TokenLogprobs
from radixkv.service.server.servicers.logprob_messages import add_logprobs
from radixkv.service.server.servicers.response_writer import PIECE_LOGPROBS, ResponseWriter
from radixkv.v1.prefill_pb2 import GenerateResponse, TokenLogprob, Usage
from radixkv.v1.prefill_pb2 import TokenLogprobs as Message


def rows_of(num_rows: int, num_top: int) -> list[TokenLogprobs]:
    top = tuple((2**32 - 1 - rank, -0.5 * rank) for rank in range(num_top))
    return [TokenLogprobs(-0.25 * number, top) for number in range(num_rows)]


def messages(rows: Iterable[TokenLogprobs]) -> list[Message]:
    return [
        Message(logprob=row.logprob, top=[TokenLogprob(token_id=each, logprob=logprob) for each, logprob in row.top])
        for row in rows
    ]


@pytest.mark.parametrize(
    ("num_generated", "num_prompt", "num_top", "is_large"),
    [(0, 0, 0, False), (2, 3, 2, False), (1, PIECE_LOGPROBS, 0, True), (700, 0, 3, True), (40, 1500, 5, True)],
)
def test_a_response_has_its_log_probabilities_however_many_they_are(
    num_generated: int, num_prompt: int, num_top: int, is_large: bool
) -> None:
    response = GenerateResponse(request_id="r", token_ids=range(num_generated), usage=Usage(prompt_tokens=7), index=3)
    expected = GenerateResponse()
    expected.CopyFrom(response)
    generated, of_prompt = rows_of(num_generated, num_top), rows_of(num_prompt, num_top)
    expected.logprobs.extend(messages(generated))
    expected.prompt_logprobs.extend(messages(of_prompt))
    written = asyncio.run(add_logprobs(ResponseWriter(), response, generated, of_prompt))
    assert isinstance(written, bytes) is is_large
    assert (GenerateResponse.FromString(written) if isinstance(written, bytes) else written) == expected


@pytest.mark.parametrize(("num_rows", "num_top"), [(1500, 0), (700, 1), (300, 20)])
def test_rows_in_arrays_are_written_as_those_in_tuples(num_rows: int, num_top: int) -> None:
    rng = np.random.default_rng(num_rows)
    logprobs = -rng.exponential(size=(num_rows, 1 + num_top)).astype(np.float32)
    # The first two rows have extreme values.
    logprobs[0], logprobs[1] = -np.inf, 0
    token_ids = (2.0 ** rng.uniform(0, 32, (num_rows, num_top))).astype(np.uint32)
    token_ids[:2] = [[0], [2**32 - 1]]
    table = LogprobTable(num_rows)
    table.put(0, LogprobRows(logprobs, token_ids))
    written = asyncio.run(add_logprobs(ResponseWriter(), GenerateResponse(index=3), [], table))
    assert isinstance(written, bytes)
    assert GenerateResponse.FromString(written) == GenerateResponse(index=3, prompt_logprobs=messages(table))
