"""The picture is drawn whatever came of the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.parts.load_generator import CallOutcome, Ending, Pass
from bench.parts.picture import draw_ttft
from bench.parts.report import build_comparison, summarize


def outcome(index: int, ttft_s: float, cached_tokens: int) -> CallOutcome:
    return CallOutcome(index, "OK", 0.0, 0.0, ttft_s, 100, cached_tokens, 100 - cached_tokens)


def failed(index: int) -> CallOutcome:
    return CallOutcome(index, "INTERNAL", 0.0, 0.0, 1.0)


def passed(*outcomes: CallOutcome, num_planned: int = 17, ended_by: Ending = Ending.FINISHED) -> Pass:
    return Pass(outcomes, 1.0, 0.1, num_planned, ended_by)


def report_of(with_cache: Pass, without_cache: Pass | None, num_enough: int) -> dict[str, Any]:
    comparison = build_comparison(with_cache, without_cache, num_enough)
    return summarize(with_cache) | {
        "workload": "shared-prefix",
        "workload_text": "17 requests",
        "traffic_text": "closed loop",
        "model": "tiny",
        "device": "cpu",
        "partial": with_cache.ended_by is not Ending.FINISHED,
        "interrupted_by": None,
        "without_cache": None if without_cache is None else summarize(without_cache),
        "speedup": comparison.speedup,
        "baseline_sample": {"with_cache_ttft_ms": comparison.with_cache_ttft_ms},
    }


HITS = (outcome(0, 0.5, 0), *(outcome(i, 0.01 + i / 1000, 90) for i in range(1, 17)))
MISSES = tuple(outcome(i, 0.5 + i / 100, 0) for i in range(17))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("with_cache", "without_cache"),
    [
        (passed(*HITS), passed(*MISSES)),
        (passed(*HITS), None),
        (passed(*HITS), passed(MISSES[0], MISSES[8])),
        (passed(failed(0), *HITS[1:]), passed(failed(0), *MISSES[1:])),
        (passed(failed(0)), passed(failed(0))),
        (passed(*HITS[:9], ended_by=Ending.TIME_LIMIT), passed(*MISSES[:3])),
        (passed(*HITS), passed(ended_by=Ending.INTERRUPTED)),
        (passed(outcome(0, 0.2, 0), num_planned=1), passed(outcome(0, 0.1, 0), num_planned=1)),
    ],
)
@pytest.mark.parametrize("num_enough", [1, 16])
def test_a_png_is_written(tmp_path: Path, with_cache: Pass, without_cache: Pass | None, num_enough: int) -> None:
    file = tmp_path / "ttft.png"
    draw_ttft(file, report_of(with_cache, without_cache, num_enough), with_cache, without_cache)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000
