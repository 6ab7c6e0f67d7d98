from __future__ import annotations

import pytest

from radixkv.service.cli.top_screen import Reading, screen
from radixkv.v1.cache_pb2 import (
    BlockStats,
    ListSegmentsResponse,
    RequestStats,
    Segment,
    StatsResponse,
    TenantStats,
    TimeStats,
    TokenStats,
)


def reading(
    uptime_s: float, prompt: int, cached: int, first_tokens: tuple[int, int, int] = (0, 0, 0), epoch: int = 1
) -> Reading:
    stats = StatsResponse(
        model="tiny",
        device="cpu",
        epoch=epoch,
        uptime_s=uptime_s,
        block_size=64,
        blocks=BlockStats(total=100, free=40, leased=10, published=50, pinned=3, retained=2),
        requests=RequestStats(running=1, waiting=2, following=3, finished=prompt // 100),
        tokens=TokenStats(prompt=prompt, cached=cached, generated=prompt // 10),
        tenants=[TenantStats(tenant="ac\x1bme", cached_blocks=30, evicted_blocks=4, hit_tokens=3, miss_tokens=1)],
        first_tokens=TimeStats(bounds_s=[0.1, 0.2], counts=first_tokens, sum_s=1.0),
    )
    hottest = ListSegmentsResponse(
        segments=[Segment(segment_id=7, num_tokens=64, num_blocks=1, num_uses=5, heat=6.0)],
        total_segments=9,
        compared_segments=9,
    )
    return Reading(stats, hottest)


def line_of(lines: list[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(name)).split()


def test_the_first_screen_tells_of_all_since_the_start() -> None:
    lines = screen(reading(100.0, 1000, 250, (2, 2, 0)), None)
    assert lines[0] == "radixkv  tiny on cpu, up 2m"
    assert lines[1] == "requests  1 running, 5 waiting, 10 finished, 0 failed"
    assert line_of(lines, "hit rate") == ["hit", "rate", "25.0", "%", "25.0", "%"]
    assert line_of(lines, "prompt tokens") == ["prompt", "tokens", "10/s", "1000"]
    assert " ".join(line_of(lines, "first token")) == "first token p50 100 ms, p99 198 ms p50 100 ms, p99 198 ms"


def test_a_screen_tells_what_is_below_the_device() -> None:
    now = reading(100.0, 1000, 250)
    now.stats.tiers.add(tier="host", is_working=True, blocks=7, loaded_blocks=2, saved_blocks=9)
    now.stats.tiers.add(tier="redis", is_working=False)
    now.stats.tenants[0].stored_blocks["host"] = 5
    lines = screen(now, None)
    assert "in host  7 blocks; 2 loaded, 9 saved so far" in lines
    assert "in redis  shared; 0 loaded, 0 saved so far; out of use" in lines
    head, row = (line.split() for line in lines[lines.index("") :] if line.strip().startswith(("tenant", "ac")))
    assert head == ["tenant", "blocks", "pinned", "retained", "evicted", "in", "host", "in", "redis", "hit", "rate"]
    assert row[1:] == ["30", "0", "0", "4", "5", "0", "75.0", "%"]


def test_later_screens_tell_what_happened_since_the_one_before() -> None:
    before, now = reading(100.0, 1000, 250, (2, 2, 0)), reading(102.0, 1200, 400, (2, 4, 0))
    lines = screen(now, before)
    assert line_of(lines, "hit rate")[2:] == ["75.0", "%", "33.3", "%"]
    assert line_of(lines, "prompt tokens")[2:] == ["100/s", "1200"]
    assert line_of(lines, "generated")[1:] == ["10/s", "120"]
    assert line_of(lines, "requests ")[1:] == ["1", "running,", "5", "waiting,", "12", "finished,", "0", "failed"]
    assert " ".join(line_of(lines, "first token")[:6]) == "first token p50 150 ms, p99"


def test_a_quiet_service_has_no_rates() -> None:
    now = reading(102.0, 1000, 250)
    assert line_of(screen(now, now), "hit rate")[2:] == ["-", "25.0", "%"]
    assert line_of(screen(now, now), "first token")[2:] == ["-", "-"]


def test_a_service_that_began_again_is_compared_with_nothing() -> None:
    lines = screen(reading(2.0, 100, 50, epoch=2), reading(100.0, 1000, 250))
    assert "since the start" in lines[3]
    assert line_of(lines, "prompt tokens")[2:] == ["50/s", "100"]


@pytest.mark.parametrize("num_columns", [62, 102])
def test_the_bar_has_the_blocks_by_state(num_columns: int) -> None:
    lines = screen(reading(1.0, 0, 0), None, num_columns)
    (bar,) = (line for line in lines if line.startswith("["))
    cells = num_columns - 2
    assert len(bar) == num_columns
    assert [bar.count(mark) for mark in "#+."] == [cells * 50 // 100, cells * 10 // 100, cells * 40 // 100]


def test_tenants_and_segments_stand_in_tables() -> None:
    lines = screen(reading(1.0, 0, 0), None)
    assert line_of(lines, "ac") == ["ac\\x1bme", "30", "0", "0", "4", "75.0", "%"]
    assert "hottest segments: 1 of 9, 9 compared" in lines
    assert lines[-1].split() == ["7", "-", "(none)", "0", "64", "1", "5", "0s", "6.0"]


def test_a_tenant_sees_its_own_line_and_segments_only() -> None:
    now = reading(100.0, 0, 0)
    for field in ("requests", "tokens", "first_tokens"):
        now.stats.ClearField(field)
    lines = screen(now, now)
    assert lines[:2] == ["radixkv  tiny on cpu, up 2m", ""]
    assert lines[2].startswith("tenant ")
    assert line_of(lines, "ac")[:2] == ["ac\\x1bme", "30"]
    assert lines[5] == "hottest segments: 1 of 9, 9 compared"


def test_a_screen_fits_into_a_terminal() -> None:
    lines = screen(reading(1.0, 0, 0), None, 30, 8)
    assert len(lines) == 8
    assert max(map(len, lines)) <= 30
