from __future__ import annotations

from radixkv.service.fleet.joined_answer import joined
from radixkv.v1.prefill_pb2 import DIVERGED, NONE, GenerateResponse, PrefillResponse, Timing, Usage

COMPUTED = PrefillResponse(
    usage=Usage(prompt_tokens=9, cached_tokens=4, computed_tokens=5, written_tokens=5, device_tokens=3, disk_tokens=1),
    miss_reason=DIVERGED,
    timing=Timing(queue_us=1, prefill_us=20, total_us=30),
)


def part(**fields) -> GenerateResponse:
    usage = Usage(prompt_tokens=9, cached_tokens=8, computed_tokens=1, generated_tokens=2, remote_tokens=8)
    usage.written_tokens = 3
    timing = Timing(queue_us=3, prefill_us=4, total_us=500, decode_us=6)
    return GenerateResponse(usage=usage, timing=timing, miss_reason=NONE, **fields)


def test_a_prompt_counts_as_it_was_computed_and_an_answer_as_it_was_generated() -> None:
    told = joined(part(finished=True), COMPUTED)
    expected = Usage()
    expected.CopyFrom(COMPUTED.usage)
    expected.generated_tokens = 2
    expected.written_tokens = 8
    assert told.usage == expected
    assert told.usage.remote_tokens == 0
    assert told.miss_reason == DIVERGED
    assert told.timing == Timing(queue_us=1, prefill_us=27, total_us=530, decode_us=6)
    assert joined(part(), COMPUTED).timing == part().timing, "times are told at the end"


def test_other_answers_and_parts_without_counts_stay_as_they_are() -> None:
    assert joined(part(index=1, finished=True), COMPUTED) == part(index=1, finished=True)
    assert joined(part(finished=True), None) == part(finished=True)
    assert joined(GenerateResponse(token_ids=[1]), COMPUTED) == GenerateResponse(token_ids=[1])
