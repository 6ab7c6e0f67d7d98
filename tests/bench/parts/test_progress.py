"""A run says how far it is, on a terminal and elsewhere."""

from __future__ import annotations

import io

from bench.parts.progress import progress
from tests.fakes import FakeClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_written_at_the_start_every_five_seconds_and_at_the_end() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with progress("with cache", 2000, stream, clock=clock) as advance:
        for _ in range(12):
            clock.now_s += 1.0
            advance()
    assert stream.getvalue().splitlines() == [
        "with cache: 0 of 2,000 requests, 0 s",
        "with cache: 5 of 2,000 requests, 5 s",
        "with cache: 10 of 2,000 requests, 10 s",
        "with cache: 12 of 2,000 requests, 12 s",
    ]


def test_a_limit_is_shown() -> None:
    stream = io.StringIO()
    with progress("without cache", 20, stream, limit_s=60.0, clock=FakeClock()):
        pass
    assert stream.getvalue().splitlines()[0] == "without cache, at most 60 s: 0 of 20 requests, 0 s"


def test_nothing_is_written_unless_lines_are_asked_for() -> None:
    stream = io.StringIO()
    with progress("with cache", 2, stream, use_lines=False) as advance:
        advance()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with progress("with cache", 2, stream, use_lines=False) as advance:
        advance()
        advance()
    assert "with cache: 100%" in stream.getvalue()
    assert "2/2" in stream.getvalue()
