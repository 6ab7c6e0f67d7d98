"""Traces have no tokens, only ids of blocks, so that the position of a difference decides its cause."""

from __future__ import annotations

import pytest

from radixkv.doctor.block_examination import BlockExaminer, trace_log
from radixkv.doctor.causes import MissCause
from radixkv.doctor.diagnosis import LogDiagnosis, diagnose
from radixkv.doctor.replay import CacheSize
from radixkv.errors import ConfigError
from radixkv.planning.trace import TraceRequest

from .logs import causes

TOKENS_PER_ID = 16


def request(
    ids: list[int], session: str = "one", *, last_id_tokens: int = TOKENS_PER_ID, output_ids: tuple[int, ...] = ()
) -> TraceRequest:
    length = TOKENS_PER_ID * (len(ids) - 1) + last_id_tokens
    return TraceRequest(0.0, length, TOKENS_PER_ID * len(output_ids), tuple(ids), TOKENS_PER_ID, output_ids, session)


def diagnose_requests(*requests: TraceRequest, capacity_tokens: int | None = None) -> LogDiagnosis:
    with trace_log(requests) as log:
        size = CacheSize(capacity_tokens, policy="lru", probation_share=1.0)
        return diagnose(log, BlockExaminer(TOKENS_PER_ID), min_lost_tokens=8, size=size)


FIRST_IDS = [*range(100, 140)]


@pytest.mark.parametrize(
    ("ids", "cause", "lost_blocks"),
    [
        ([*FIRST_IDS, 1, 2], None, 0),
        ([*FIRST_IDS[:39], 1, 2], None, 0),  # a new id for the last block, which is filled up
        ([1, *range(200, 240)], MissCause.HEAD_CHANGED, 40),
        ([*FIRST_IDS[:20], *range(200, 220)], MissCause.MIDDLE_CHANGED, 20),
        ([*FIRST_IDS[:5], *range(200, 210)], MissCause.COMPACTED, 10),
        ([*FIRST_IDS[:10], 1, 2, *FIRST_IDS[10:]], MissCause.REALIGNED, 30),
    ],
    ids=["continued", "last block filled up", "head", "middle", "compacted", "two blocks inserted"],
)
def test_the_position_of_a_difference_in_a_session_decides_its_cause(
    ids: list[int], cause: MissCause | None, lost_blocks: int
) -> None:
    finding = diagnose_requests(request(FIRST_IDS), request(ids)).findings[1]
    assert (None if finding is None else finding.key.cause) is cause
    if finding is not None:
        max_reusable_tokens = len(ids) * TOKENS_PER_ID - 1  # the last token is always computed
        assert finding.lost_tokens == min(lost_blocks * TOKENS_PER_ID, max_reusable_tokens)
        assert finding.is_bound == (cause is not MissCause.REALIGNED)


def test_prompts_of_different_sessions_are_not_compared() -> None:
    assert causes(diagnose_requests(request(FIRST_IDS), request([1, *range(200, 240)], "two"))) == [None, None]
    assert causes(diagnose_requests(request(FIRST_IDS, ""), request([1, *range(200, 240)], ""))) == [None, None]


def test_a_last_block_that_is_not_full_counts_with_its_tokens() -> None:
    diagnosis = diagnose_requests(request(FIRST_IDS, last_id_tokens=3), request([*FIRST_IDS, 1], last_id_tokens=5))
    assert diagnosis.prompt_tokens == 39 * TOKENS_PER_ID + 3 + 40 * TOKENS_PER_ID + 5
    assert diagnosis.cached_tokens == 40 * TOKENS_PER_ID


def test_evicted_blocks_are_counted_in_tokens() -> None:
    fillers = [request([*range(start, start + 40)], f"filler {start}") for start in (1000, 2000, 3000)]
    diagnosis = diagnose_requests(request(FIRST_IDS), *fillers, request(FIRST_IDS), capacity_tokens=100 * TOKENS_PER_ID)
    assert causes(diagnosis)[-1] is MissCause.EVICTED_BY_OWN
    assert diagnosis.groups[0].lost_tokens == 39 * TOKENS_PER_ID  # the last token and so the last block are computed


def test_answers_of_a_recorded_trace_are_cached() -> None:
    first = TraceRequest(0.0, TOKENS_PER_ID * 2 + 4, TOKENS_PER_ID, (1, 2, 3), TOKENS_PER_ID, (30, 31), "one")
    diagnosis = diagnose_requests(first, request([1, 2, 30, 31, 5]))
    assert diagnosis.cached_tokens == 4 * TOKENS_PER_ID


def test_blocks_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of one size, got 8, 16 tokens"):
        trace_log([request(FIRST_IDS), TraceRequest(0.0, 8, 0, (1,), 8)])
