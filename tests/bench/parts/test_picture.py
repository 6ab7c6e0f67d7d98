"""The picture is drawn whatever came of the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.parts.load_generator import Outcome, Pass
from bench.parts.picture import draw_ttft
from bench.parts.report import speedup, summarize


def outcome(ttft_s: float, cached_tokens: int) -> Outcome:
    return Outcome("OK", 0.0, 0.0, ttft_s, 100, cached_tokens, 100 - cached_tokens)


def report_of(with_cache: Pass, without_cache: Pass | None) -> dict[str, Any]:
    summary = summarize(with_cache)
    other = None if without_cache is None else summarize(without_cache)
    return summary | {
        "workload": "shared-prefix",
        "workload_text": "17 requests",
        "traffic_text": "closed loop",
        "model": "tiny",
        "device": "cpu",
        "without_cache": other,
        "speedup": None if other is None else speedup(summary, other),
    }


FAILED = Outcome("INTERNAL", 0.0, 0.0, 1.0)
HITS = Pass((outcome(0.5, 0), *(outcome(0.01 + i / 1000, 90) for i in range(16))), 1.0, 0.1)
MISSES = Pass(tuple(outcome(0.5 + i / 100, 0) for i in range(17)), 9.0, 0.1)


@pytest.mark.parametrize(
    ("with_cache", "without_cache", "indices"),
    [
        (HITS, MISSES, list(range(17))),
        (HITS, None, []),
        (HITS, Pass(MISSES.outcomes[:2], 1.0, 0.1), [0, 8]),
        (Pass((FAILED, *HITS.outcomes[1:]), 1.0, 0.1), Pass((FAILED, *MISSES.outcomes[1:]), 9.0, 0.1), list(range(17))),
        (Pass((FAILED,), 1.0, 0.1), Pass((FAILED,), 1.0, 0.1), [0]),
        (Pass((outcome(0.2, 0),), 1.0, 0.1), Pass((outcome(0.1, 0),), 1.0, 0.1), [0]),
    ],
)
def test_a_png_is_written(tmp_path: Path, with_cache: Pass, without_cache: Pass | None, indices: list[int]) -> None:
    file = tmp_path / "ttft.png"
    draw_ttft(file, report_of(with_cache, without_cache), with_cache, without_cache, indices)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000
