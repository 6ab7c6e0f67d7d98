"""Formats the comparison as a table."""

from __future__ import annotations

from collections.abc import Sequence

from bench.parts.peers.comparison import Result, by_setting
from bench.parts.peers.engines import OURS


def format_table(rows: Sequence[Result], skipped: dict[str, str], failures: Sequence[str]) -> str:
    """Format all rows: a block per setting, then the engines that were skipped, and the failures."""
    blocks = [
        "\n".join([f"{setting}: wall (CPU) time, medians", *_format_lines(each), *_format_first_tokens(each)])
        for setting, each in by_setting(rows).items()
    ]
    notes = [f"skipped {engine}: {_shorten(reason)}" for engine, reason in skipped.items()]
    notes += [f"FAILED {_shorten(failure)}" for failure in failures]
    return "\n\n".join([*blocks, "\n".join(notes)]).rstrip()


def _shorten(message: str) -> str:
    """Keep the first line and the last, which has the exception; the result file has the whole message."""
    first, *later_lines = message.splitlines()
    return f"{first} {later_lines[-1]}" if later_lines else first


def _format_lines(rows: Sequence[Result]) -> list[str]:
    engines = list(dict.fromkeys(engine for row in rows for engine in row["engines"]))
    cells = [["", *engines, "ours / best", "CPU", "limit", "ours / limit"]]
    for row in rows:
        times = [format_time(row["unit"], row["engines"].get(engine)) for engine in engines]
        wall = _format_ratio(row["ratio"], row["best_peer"])
        cpu = _format_ratio(row["cpu_ratio"], row["cpu_best_peer"])
        cells.append([row["title"], *times, wall, cpu, *_limit(row)])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in cells]
    rule = "-" * max(map(len, lines))
    return [rule, lines[0], rule, *lines[1:], rule]


def _format_ratio(ratio: float | None, best_peer: str | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} {best_peer}"


def _limit(row: Result) -> tuple[str, str]:
    """Return the minimum time on this machine, and our time as a multiple of it."""
    min_s, ours = row["least_s"], row["engines"].get(OURS)
    if min_s is None:
        return "-", "-"
    shown = f"{1 / min_s:,.0f}/s" if row["unit"] == "call" else format_seconds(min_s)
    return shown, "-" if ours is None else f"{ours['wall_s'] / min_s:.2f}"


def format_seconds(seconds: float) -> str:
    """Format a time, short ones in milliseconds.

    >>> format_seconds(0.0576), format_seconds(5.2)
    ('57.6 ms', '5.20 s')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def format_time(unit: str, summary: Result | None) -> str:
    """Format wall and CPU time of a unit: calls as calls per second and CPU milliseconds, tokens in milliseconds.

    >>> format_time("call", {"wall_s": 0.004, "cpu_s": 0.0051}), format_time("request", {"wall_s": 0.26, "cpu_s": 0.3})
    ('250/s (5.1 ms)', '0.26 s (0.30)')
    """
    if summary is None:
        return "-"
    wall_s, cpu_s = summary["wall_s"], summary["cpu_s"]
    if unit == "call":
        return f"{1 / wall_s:,.0f}/s ({cpu_s * 1e3:.1f} ms)"
    if unit == "token":
        return f"{wall_s * 1e3:.1f} ms ({cpu_s * 1e3:.1f})"
    return f"{wall_s:.2f} s ({cpu_s:.2f})"


def _format_first_tokens(rows: Sequence[Result]) -> list[str]:
    counted: dict[str, tuple[int, int]] = {}
    for row in rows:
        for engine, each in row["engines"].items():
            tokens, different = counted.get(engine, (0, 0))
            counted[engine] = (tokens + each["first_tokens"], different + each["different_first_tokens"])
    differing = [f"{engine} {different} of {tokens}" for engine, (tokens, different) in counted.items() if different]
    summary = ", ".join(differing) if differing else f"none of {sum(tokens for tokens, _ in counted.values())}"
    return [f"first tokens that differ from those of most engines: {summary}"] if counted else []
