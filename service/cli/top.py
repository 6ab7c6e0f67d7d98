"""`radixkv top`: shows in a terminal what the cache holds and how it is used, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from radixkv.api.stats import TimeStats
from radixkv.service.cli.argument_types import name, period
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_options, flag
from radixkv.service.cli.output import json_of
from radixkv.service.cli.segments import awaits_text, segment_rows
from radixkv.service.cli.terminal import align_columns, duration, tenant_label
from radixkv.v1.cache_pb2 import ListSegmentsResponse, StatsResponse, TierStats
from radixkv.v1.cache_pb2 import TimeStats as TimeStatsMessage

if TYPE_CHECKING:
    from radixkv.service.client import Client

_PERIOD_S = 2.0
_MAX_TENANTS = 10
_MAX_SESSIONS = 8
_MAX_SEGMENTS = 40
# The alternate screen restores the terminal's contents at the end; the cursor is hidden on it.
_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_MIN_COLUMNS = 60
_BAR = (("published", "#"), ("leased", "+"), ("free", "."))
_OPTIONS = (
    Option(
        "--tenant", "NAME", name, "segments of this tenant (default: all, or your own with the credential of a tenant)"
    ),
    Option("--interval", "S", period, "seconds between two updates", _PERIOD_S),
    flag("--once", "show one screen, with the rates since the server started"),
)


def add_arguments(top: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    top.description = (
        "Watch what the cache holds and how it is used, until Ctrl-C. A terminal is redrawn; other outputs get one "
        "screen after the other, and --json prints one line for each."
    )
    add_options(top, _OPTIONS)
    add_connection(top)
    top.set_defaults(command=_top)


class StatsSample(NamedTuple):
    """The state of a service at one moment.

    Attributes:
        stats: its statistics.
        hottest: its hottest segments.
    """

    stats: StatsResponse
    hottest: ListSegmentsResponse


def screen(
    now: StatsSample, before: StatsSample | None, num_columns: int = 120, num_lines: int | None = None
) -> list[str]:
    """Return the lines of a screen. A tenant may not see global rates, requests and blocks; its screen leaves them out.

    Args:
        now: the current sample.
        before: the previous sample, for the rates between the two; None for the rates since the start. A sample from
            before a restart of the service is ignored.
        num_columns: width; longer lines are cut.
        num_lines: height; further lines are omitted; None for no limit.
    """
    stats = now.stats
    if before is not None and before.stats.epoch != stats.epoch:
        before = None
    sections = [[f"radixkv  {stats.model} on {stats.device}, up {duration(stats.uptime_s)}"]]
    if stats.HasField("requests"):
        sections[0].append(_requests_line(stats))
        sections.append(_rate_lines(stats, None if before is None else before.stats))
        sections.append([*_block_lines(stats, max(_MIN_COLUMNS, num_columns)), *map(_tier_line, stats.tiers)])
    sections.append(_tenant_lines(stats))
    if stats.sessions:
        sections.append(_session_lines(stats))
    sections.append(_segment_lines(now.hottest))
    lines = [line for section in sections for line in (*section, "")][:-1]  # an empty line between two sections
    return [line[:num_columns] for line in lines[:num_lines]]


def _top(arguments: argparse.Namespace) -> None:
    is_drawn = sys.stdout.isatty() and not arguments.json and not arguments.once
    with client_of(arguments) as client, _alternate_screen(is_drawn):
        before: StatsSample | None = None
        try:
            while True:
                now = _fetch_sample(client, arguments.tenant)
                if arguments.json:
                    print(_json(now), flush=True)
                elif is_drawn:
                    size = shutil.get_terminal_size()
                    lines = screen(now, before, size.columns, size.lines - 1)
                    print(
                        _HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW, end="", flush=True
                    )
                else:
                    print("\n".join(screen(now, before)), end="\n" if arguments.once else "\n\n", flush=True)
                if arguments.once:
                    return
                before = now
                time.sleep(arguments.interval)
        except KeyboardInterrupt:
            return


def _fetch_sample(client: Client, tenant: str | None) -> StatsSample:
    stats = client.stats(max_tenants=_MAX_TENANTS, max_sessions=_MAX_SESSIONS)
    return StatsSample(stats, client.segments(tenant=tenant, page_size=_MAX_SEGMENTS, hottest_first=True))


def _json(sample: StatsSample) -> str:
    messages = {"stats": sample.stats, "hottest": sample.hottest}
    return json.dumps({name: json.loads(json_of(message)) for name, message in messages.items()})


@contextmanager
def _alternate_screen(is_used: bool) -> Iterator[None]:
    if is_used:
        print(_ENTER, end="", flush=True)
    try:
        yield
    finally:
        if is_used:
            print(_LEAVE, end="", flush=True)


def _requests_line(stats: StatsResponse) -> str:
    requests = stats.requests
    waiting = requests.waiting + requests.following
    ended = f"{requests.finished} finished, {requests.failed} failed"
    return f"requests  {requests.running} running, {waiting} waiting, {ended}"


def _rate_lines(stats: StatsResponse, before: StatsResponse | None) -> list[str]:
    start = StatsResponse() if before is None else before
    seconds = max(stats.uptime_s - start.uptime_s, 1e-3)
    prompt, cached = stats.tokens.prompt - start.tokens.prompt, stats.tokens.cached - start.tokens.cached
    generated = stats.tokens.generated - start.tokens.generated
    finished = stats.requests.finished - start.requests.finished
    first_tokens = _times(stats.first_tokens)
    if before is not None:
        first_tokens = first_tokens.since(_times(before.first_tokens))
    rows = [
        ("", "now" if before is not None else "since the start", "in all"),
        ("hit rate", _percent(cached, prompt), _percent(stats.tokens.cached, stats.tokens.prompt)),
        ("prompt tokens", f"{prompt / seconds:.0f}/s", str(stats.tokens.prompt)),
        ("generated", f"{generated / seconds:.0f}/s", str(stats.tokens.generated)),
        ("requests", f"{finished / seconds:.1f}/s", str(stats.requests.finished)),
        ("first token", _quantiles(first_tokens), _quantiles(_times(stats.first_tokens))),
    ]
    return align_columns(rows)


def _block_lines(stats: StatsResponse, num_columns: int) -> list[str]:
    blocks = stats.blocks
    bar_columns = num_columns - 2  # without the brackets
    num_blocks = 0
    bar = ""
    for state, mark in _BAR:
        num_blocks += getattr(blocks, state)
        end = round(bar_columns * num_blocks / max(blocks.total, 1))
        bar += mark * (end - len(bar))
    return [
        f"blocks  {blocks.total} of {stats.block_size} tokens: {blocks.published} published #, "
        f"{blocks.leased} leased +, {blocks.free} free .; {blocks.pinned} pinned, {blocks.retained} retained",
        f"[{bar}]",
    ]


def _tier_line(tier: TierStats) -> str:
    blocks = f"{tier.blocks} blocks" if tier.HasField("blocks") else "shared"
    state = "" if tier.is_working else "; disabled"
    return f"in {tier.tier}  {blocks}; {tier.loaded_blocks} loaded, {tier.saved_blocks} saved so far{state}"


def _tenant_lines(stats: StatsResponse) -> list[str]:
    stores = [tier.tier for tier in stats.tiers]
    store_columns = [f"in {store}" for store in stores]
    rows: list[tuple[str, ...]] = [("tenant", "blocks", "pinned", "retained", "evicted", *store_columns, "hit rate")]
    for tenant in stats.tenants:
        rate = _percent(tenant.hit_tokens, tenant.hit_tokens + tenant.miss_tokens)
        counts = (tenant.cached_blocks, tenant.pinned_blocks, tenant.retained_blocks, tenant.evicted_blocks)
        stored = (tenant.stored_blocks.get(store, 0) for store in stores)
        rows.append((tenant_label(tenant.tenant), *map(str, (*counts, *stored)), rate))
    return align_columns(rows, is_right=True)


def _session_lines(stats: StatsResponse) -> list[str]:
    rows = [("session used last", "tenant", "blocks of its own", "running", "idle", "")]
    for session in stats.sessions:
        counts = (str(session.blocks), str(session.running_requests), duration(session.idle_s))
        rows.append((session.session_id, tenant_label(session.tenant), *counts, awaits_text(session.awaits)))
    return align_columns(rows, is_right=True)


def _segment_lines(hottest: ListSegmentsResponse) -> list[str]:
    total = f" of {hottest.total_segments}" if hottest.HasField("total_segments") else ""
    title = f"hottest segments: {len(hottest.segments)}{total}, {hottest.compared_segments} compared"
    return [title, *align_columns(segment_rows(hottest.segments), is_right=True)]


def _times(message: TimeStatsMessage) -> TimeStats:
    return TimeStats(tuple(message.bounds_s), tuple(message.counts), message.sum_s)


def _quantiles(times: TimeStats) -> str:
    p50_s, p99_s = times.quantile_s(0.5), times.quantile_s(0.99)
    if p50_s is None or p99_s is None:
        return "-"
    return f"p50 {1000 * p50_s:.0f} ms, p99 {1000 * p99_s:.0f} ms"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
