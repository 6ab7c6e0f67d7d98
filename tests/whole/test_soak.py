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
from tests.whole.soak import (
    MAX_GROWTH_BYTES,
    Report,
    Sample,
    complete,
    growth_bytes_per_10k_calls,
    run_soak,
    take_sample,
)

PASSED = "check passed, 0 leased, 0 pinned"


def samples(leaked_bytes_per_call: float, *, peak_bytes: int = 0, num_new_threads: int = 0) -> list[Sample]:
    """Return ten minutes of samples of a server that leaks memory; every seventh sample is higher by a peak."""
    return [
        Sample(
            time_s=10.0 * index,
            num_calls=1000 * index,
            anonymous_bytes=400_000_000
            + int(1000 * index * leaked_bytes_per_call)
            + (peak_bytes if index % 7 == 3 else 0),
            file_backed_bytes=0,
            num_threads=20 + (num_new_threads if index > 30 else 0),
            num_descriptors=30,
        )
        for index in range(60)
    ]


@pytest.mark.parametrize("bytes_per_call", [0, 20, 3000])
def test_growth_is_found_in_spite_of_peaks(bytes_per_call: int) -> None:
    growth_bytes = growth_bytes_per_10k_calls(samples(bytes_per_call, peak_bytes=20_000_000))
    assert growth_bytes == pytest.approx(10_000 * bytes_per_call, abs=50_000)
    report = Report(warm_samples=samples(bytes_per_call, peak_bytes=20_000_000), last_output=PASSED)
    assert (report.growth_bytes > MAX_GROWTH_BYTES) == bool(report.mistakes) == (bytes_per_call == 3000)


def test_wrong_answers_and_resources_left_behind_are_mistakes() -> None:
    report = Report(
        outcomes=Counter({"prefilled": 9, "WRONG n of prompt 3": 2, "UNEXPECTED UNAVAILABLE x": 1}),
        warm_samples=samples(0, num_new_threads=9),
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
    """An `AsyncClient` whose completions consist of the given responses."""

    def __init__(self, *responses: GenerateResponse) -> None:
        self._responses = responses

    async def generate(self, _: list[int], **__: Any) -> AsyncIterator[GenerateResponse]:
        for response in self._responses:
            yield response


def response(logprobs: dict[int, float], prompt_logprobs: tuple[float, ...] = ()) -> GenerateResponse:
    """Return a response with tokens, their log probabilities, and those of the tokens of the prompt."""
    rows = [TokenLogprobs(logprob=each) for each in logprobs.values()]
    prompt_rows = [TokenLogprobs(logprob=each) for each in prompt_logprobs]
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
def test_completions_are_compared_without_their_division_into_responses(
    responses: list[GenerateResponse], is_equal: bool
) -> None:
    first, second = (
        asyncio.run(complete(cast("AsyncClient", ScriptedClient(*each)), [1]))
        for each in ([response({5: -0.5}, (-1.5,)), response({6: -0.25})], responses)
    )
    assert (first == second) == is_equal


def test_a_sample_reads_this_process() -> None:
    # Memory of an allocator would not do, because it may keep what is freed.
    ballast = mmap.mmap(-1, 30_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ballast.write(bytes(30_000_000))
    before = take_sample(os.getpid(), time_s=0.0, num_calls=0)
    ballast.close()
    after = take_sample(os.getpid(), time_s=1.0, num_calls=1)
    assert before.anonymous_bytes - after.anonymous_bytes == pytest.approx(30e6, abs=5e6)
    assert before.num_threads >= 1
    assert before.num_descriptors >= 3


@pytest.mark.slow
def test_a_short_soak_makes_every_kind_of_call_without_a_mistake() -> None:
    report = run_soak(minutes=6, warm_up_minutes=3)
    # Six minutes are too short for a measurement of growth.
    assert [each for each in report.mistakes if "memory grew" not in each] == []
    expected_outcomes = {
        "adapter",
        "n",
        "regex",
        "schema",
        "gateway",
        "visitor",
        "events",
        "purged",
        "held",
        "cancelled",
    }
    assert expected_outcomes <= set(report.outcomes)
    assert report.num_killed
