"""Traces have only ids of blocks, so causes are classified by their position."""

from __future__ import annotations

import pytest

from radixkv.doctor.block_examination import BlockExaminer
from radixkv.doctor.causes import MissCause
from radixkv.doctor.diagnosis import LogDiagnosis, diagnose
from radixkv.doctor.replay import CacheSize
from radixkv.doctor.trace_log import trace_log
from radixkv.errors import ConfigError
from radixkv.planning.trace import TraceRequest

from .logs import causes

SIZE = 16  # tokens of an id


def request(ids: list[int], session: str = "one", *, rest: int = SIZE, output: tuple[int, ...] = ()) -> TraceRequest:
    length = SIZE * (len(ids) - 1) + rest
    return TraceRequest(0.0, length, SIZE * len(output), tuple(ids), SIZE, output, session)


def diagnosed(*requests: TraceRequest, capacity_tokens: int | None = None) -> LogDiagnosis:
    with trace_log(requests) as log:
        size = CacheSize(capacity_tokens, policy="lru", probation_share=1.0)
        return diagnose(log, BlockExaminer(SIZE), min_lost_tokens=8, size=size)


FIRST = [*range(100, 140)]


@pytest.mark.parametrize(
    ("ids", "cause", "lost_blocks"),
    [
        ([*FIRST, 1, 2], None, 0),
        ([*FIRST[:39], 1, 2], None, 0),  # the last block is longer now
        ([1, *range(200, 240)], MissCause.HEAD_CHANGED, 40),
        ([*FIRST[:20], *range(200, 220)], MissCause.MIDDLE_CHANGED, 20),
        ([*FIRST[:5], *range(200, 210)], MissCause.COMPACTED, 10),
        ([*FIRST[:10], 1, 2, *FIRST[10:]], MissCause.REALIGNED, 30),
    ],
)
def test_the_place_of_a_change_in_a_session(ids: list[int], cause: MissCause | None, lost_blocks: int) -> None:
    finding = diagnosed(request(FIRST), request(ids)).findings[1]
    assert (None if finding is None else finding.key.cause) is cause
    if finding is not None:
        assert finding.lost_tokens == min(lost_blocks * SIZE, len(ids) * SIZE - 1)
        assert finding.is_bound == (cause is not MissCause.REALIGNED)


def test_other_sessions_are_not_compared() -> None:
    assert causes(diagnosed(request(FIRST), request([1, *range(200, 240)], "two"))) == [None, None]
    assert causes(diagnosed(request(FIRST, ""), request([1, *range(200, 240)], ""))) == [None, None]


def test_tokens_are_those_of_the_prompts() -> None:
    found = diagnosed(request(FIRST, rest=3), request([*FIRST, 1], rest=5))
    assert found.prompt_tokens == 39 * SIZE + 3 + 40 * SIZE + 5
    assert found.cached_tokens == 40 * SIZE


def test_evicted_blocks_are_counted_in_tokens() -> None:
    fillers = [request([*range(start, start + 40)], f"filler {start}") for start in (1000, 2000, 3000)]
    found = diagnosed(request(FIRST), *fillers, request(FIRST), capacity_tokens=100 * SIZE)
    assert causes(found)[-1] is MissCause.EVICTED_BY_OWN
    assert found.groups[0].lost_tokens == 39 * SIZE  # the last block is computed for its last token


def test_answers_of_a_recorded_trace_are_cached() -> None:
    first = TraceRequest(0.0, SIZE * 2 + 4, SIZE, (1, 2, 3), SIZE, (30, 31), "one")
    found = diagnosed(first, request([1, 2, 30, 31, 5]))
    assert found.cached_tokens == 4 * SIZE


def test_blocks_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of one size, got 8, 16 tokens"):
        trace_log([request(FIRST), TraceRequest(0.0, 8, 0, (1,), 8)])
