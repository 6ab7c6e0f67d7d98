"""One screen of `radixkv top`, as lines of text."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.api.stats import TimeStats
from radixkv.service.cli.segments import duration, segment_rows
from radixkv.service.cli.terminal import aligned
from radixkv.v1.cache_pb2 import ListSegmentsResponse, StatsResponse, TierStats
from radixkv.v1.cache_pb2 import TimeStats as TimeStatsMessage

_LEAST_COLUMNS = 60
_BAR = (("published", "#"), ("leased", "+"), ("free", "."))


class Reading(NamedTuple):
    """Answers of a service at one moment.

    Attributes:
        stats: its counts.
        hottest: its hottest segments.
    """

    stats: StatsResponse
    hottest: ListSegmentsResponse


def screen(now: Reading, before: Reading | None, num_columns: int = 120, num_lines: int | None = None) -> list[str]:
    """Return the lines of a screen. A tenant is told no rates, requests or blocks of all, so its screen has none.

    Args:
        now: the last reading.
        before: the one before it, for what happened between the two; None for what happened since the start. One of an
            earlier life of the service counts as none.
        num_columns: longer lines are cut.
        num_lines: later ones are left out; None for all.
    """
    stats = now.stats
    if before is not None and before.stats.epoch != stats.epoch:
        before = None
    parts = [[f"radixkv  {stats.model} on {stats.device}, up {duration(stats.uptime_s)}"]]
    if stats.HasField("requests"):
        parts[0].append(_requests(stats))
        parts.append(_rates(stats, None if before is None else before.stats))
        parts.append([*_blocks(stats, max(_LEAST_COLUMNS, num_columns)), *map(_store, stats.tiers)])
    parts += [_tenant_lines(stats), _segments(now.hottest)]
    lines = [line for part in parts for line in ("", *part)][1:]
    return [line[:num_columns] for line in lines[:num_lines]]


def _requests(stats: StatsResponse) -> str:
    requests = stats.requests
    waiting = requests.waiting + requests.following
    ended = f"{requests.finished} finished, {requests.failed} failed"
    return f"requests  {requests.running} running, {waiting} waiting, {ended}"


def _rates(stats: StatsResponse, before: StatsResponse | None) -> list[str]:
    then = StatsResponse() if before is None else before
    seconds = max(stats.uptime_s - then.uptime_s, 1e-3)
    prompt, cached = stats.tokens.prompt - then.tokens.prompt, stats.tokens.cached - then.tokens.cached
    generated = stats.tokens.generated - then.tokens.generated
    finished = stats.requests.finished - then.requests.finished
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
    return aligned(rows)


def _blocks(stats: StatsResponse, num_columns: int) -> list[str]:
    blocks = stats.blocks
    width = num_columns - 2
    ends = [0]
    for name, _ in _BAR:
        ends.append(ends[-1] + getattr(blocks, name))
    cells = [round(width * end / max(blocks.total, 1)) for end in ends]
    bar = "".join(mark * (cells[index + 1] - cells[index]) for index, (_, mark) in enumerate(_BAR))
    return [
        f"blocks  {blocks.total} of {stats.block_size} tokens: {blocks.published} published #, "
        f"{blocks.leased} leased +, {blocks.free} free .; {blocks.pinned} pinned, {blocks.retained} retained",
        f"[{bar}]",
    ]


def _store(tier: TierStats) -> str:
    blocks = f"{tier.blocks} blocks" if tier.HasField("blocks") else "shared"
    state = "" if tier.is_working else "; out of use"
    return f"in {tier.tier}  {blocks}; {tier.loaded_blocks} loaded, {tier.saved_blocks} saved so far{state}"


def _tenant_lines(stats: StatsResponse) -> list[str]:
    stores = [tier.tier for tier in stats.tiers]
    below = [f"in {store}" for store in stores]
    rows: list[tuple[str, ...]] = [("tenant", "blocks", "pinned", "retained", "evicted", *below, "hit rate")]
    for tenant in stats.tenants:
        rate = _percent(tenant.hit_tokens, tenant.hit_tokens + tenant.miss_tokens)
        counts = (tenant.cached_blocks, tenant.pinned_blocks, tenant.retained_blocks, tenant.evicted_blocks)
        stored = (tenant.stored_blocks.get(store, 0) for store in stores)
        rows.append((tenant.tenant or "(none)", *map(str, (*counts, *stored)), rate))
    return aligned(rows, is_right=True)


def _segments(hottest: ListSegmentsResponse) -> list[str]:
    total = f" of {hottest.total_segments}" if hottest.HasField("total_segments") else ""
    title = f"hottest segments: {len(hottest.segments)}{total}, {hottest.compared_segments} compared"
    return [title, *aligned(segment_rows(hottest.segments), is_right=True)]


def _times(message: TimeStatsMessage) -> TimeStats:
    return TimeStats(tuple(message.bounds_s), tuple(message.counts), message.sum_s)


def _quantiles(times: TimeStats) -> str:
    median_s, most_s = times.quantile_s(0.5), times.quantile_s(0.99)
    if median_s is None or most_s is None:
        return "-"
    return f"p50 {1000 * median_s:.0f} ms, p99 {1000 * most_s:.0f} ms"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
