"""The soak detects growing memory and wrong answers, and a short soak of the service finds neither."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from radixkv.service.client import AsyncClient
from radixkv.v1.prefill_pb2 import GenerateResponse, TokenLogprobs
from tests.whole.soak import MAX_GROWTH_BYTES, Report, Sample, answer_of, growth_per_10k_calls, run_soak, sample

PASSED = "check passed, 0 leased, 0 pinned"


def samples(bytes_per_call: float, *, noise: int = 0, more_threads: int = 0) -> list[Sample]:
    """Return samples of a server that leaks a number of bytes per call, with occasional peaks."""
    return [
        Sample(
            10.0 * index,
            1000 * index,
            400_000_000 + int(1000 * index * bytes_per_call) + (noise if index % 7 == 3 else 0),
            0,
            0,
            20 + (more_threads if index > 30 else 0),
            30,
        )
        for index in range(60)
    ]


@pytest.mark.parametrize("bytes_per_call", [0, 20, 3000])
def test_growth_is_found_in_spite_of_peaks(bytes_per_call: int) -> None:
    grown = growth_per_10k_calls(samples(bytes_per_call, noise=20_000_000))
    assert grown == pytest.approx(10_000 * bytes_per_call, abs=50_000)
    report = Report(warm=samples(bytes_per_call, noise=20_000_000), last_output=PASSED)
    assert (report.growth_bytes > MAX_GROWTH_BYTES) == bool(report.mistakes) == (bytes_per_call == 3000)


def test_wrong_answers_and_what_is_left_are_mistakes() -> None:
    report = Report(
        outcomes=Counter({"prefilled": 9, "WRONG n of prompt 3": 2, "UNEXPECTED UNAVAILABLE x": 1}),
        warm=samples(0, more_threads=9),
        left_behind={"held leases": 0, "pinned blocks": 4},
        last_output="check failed",
    )
    assert report.mistakes == [
        "2 WRONG n of prompt 3",
        "1 UNEXPECTED UNAVAILABLE x",
        "4 pinned blocks left",
        "the server ended with 'check failed'",
        "9 threads left",
    ]
    assert Report(last_output=PASSED).mistakes == ["expected at least 10 samples after the warm-up, got 0"]


class ScriptedClient:
    """Answers with the given responses."""

    def __init__(self, *responses: GenerateResponse) -> None:
        self._responses = responses

    async def generate(self, _: list[int], **__: Any) -> AsyncIterator[GenerateResponse]:
        for response in self._responses:
            yield response


def response(logprobs: dict[int, float], of_prompt: tuple[float, ...] = ()) -> GenerateResponse:
    """A response with tokens and their log probabilities."""
    rows = [TokenLogprobs(logprob=each) for each in logprobs.values()]
    prompt_rows = [TokenLogprobs(logprob=each) for each in of_prompt]
    return GenerateResponse(token_ids=list(logprobs), logprobs=rows, prompt_logprobs=prompt_rows)


@pytest.mark.parametrize(
    ("responses", "is_equal"),
    [
        ([response({5: -0.5}, (-1.5,)), response({6: -0.25})], True),
        ([response({5: -0.5, 6: -0.25}, (-1.5,))], True),
        ([response({5: -0.5, 7: -0.25}, (-1.5,))], False),
        ([response({5: -0.5, 6: -0.26}, (-1.5,))], False),
        ([response({5: -0.25, 6: -0.5}, (-1.5,))], False),
        ([response({5: -0.5, 6: -0.25}, (-1.75,))], False),
        ([response({5: -0.5, 6: -0.25})], False),
    ],
)
def test_answers_are_compared_by_their_numbers_and_not_by_their_division(
    responses: list[GenerateResponse], is_equal: bool
) -> None:
    first, second = (
        asyncio.run(answer_of(cast("AsyncClient", ScriptedClient(*each)), [1]))
        for each in ([response({5: -0.5}, (-1.5,)), response({6: -0.25})], responses)
    )
    assert (first == second) == is_equal


def test_a_sample_reads_this_process() -> None:
    ballast = mmap.mmap(-1, 30_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # an allocator may keep its memory
    ballast.write(bytes(30_000_000))
    before = sample(os.getpid(), 0.0, 0)
    ballast.close()
    after = sample(os.getpid(), 1.0, 1)
    assert before.anonymous - after.anonymous == pytest.approx(30e6, abs=5e6)
    assert before.threads >= 1
    assert before.descriptors >= 3


@pytest.mark.slow
def test_a_short_soak_makes_every_kind_of_call_without_a_mistake() -> None:
    report = run_soak(minutes=6, warm_up_minutes=3)
    assert [each for each in report.mistakes if "memory grew" not in each] == []
    kinds = {"adapter", "n", "regex", "schema", "gateway", "visitor", "events", "purged", "held", "cancelled"}
    assert kinds <= set(report.outcomes)
    assert report.num_killed
