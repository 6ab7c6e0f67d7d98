"""`radixkv stats`: what the cache holds and the counters of the service, once or until Ctrl-C."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING

from radixkv.service.cli.argument_types import name, period
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_options
from radixkv.service.cli.output import json_of
from radixkv.service.cli.terminal import align_columns, percent, tenant_label
from radixkv.v1.cache_pb2 import StatsResponse

if TYPE_CHECKING:
    from radixkv.service.client import Client

_PERIOD_S = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[J"  # moves the cursor to the top left and erases everything below it
_OPTIONS = (
    Option(
        "--watch",
        "S",
        period,
        f"refresh every S seconds until Ctrl-C, every {_PERIOD_S:g} seconds without a number; a terminal is redrawn, "
        "other outputs get one table after the other, and --json prints one line each (default: show once)",
        more={"nargs": "?", "const": _PERIOD_S},
    ),
    Option(
        "--tenant",
        "NAME",
        name,
        "only what this tenant may see (default: everything, or what you may see with the credential of a tenant)",
    ),
)


def add_arguments(stats: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    stats.description = "Show what the cache holds and the counters of the service."
    add_options(stats, _OPTIONS)
    add_connection(stats)
    stats.set_defaults(command=_stats)


def _stats(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        if arguments.watch is None:
            stats = client.stats(tenant=arguments.tenant)
            print(json_of(stats) if arguments.json else stats_table(stats))
        else:
            _watch(client, arguments.watch, arguments.tenant, as_json=arguments.json)


def _watch(client: Client, period_s: float, tenant: str | None, *, as_json: bool) -> None:
    """Print the statistics until Ctrl-C."""
    is_redrawn = sys.stdout.isatty() and not as_json
    try:
        while True:
            stats = client.stats(tenant=tenant)
            if as_json:
                print(json_of(stats, indent=None), flush=True)
            elif is_redrawn:
                lines = stats_table(stats).splitlines()[: shutil.get_terminal_size().lines - 1]
                print(_HOME_AND_CLEAR + "\n".join(lines), flush=True)
            else:
                print(stats_table(stats), end="\n\n", flush=True)
            time.sleep(period_s)
    except KeyboardInterrupt:
        return


def stats_table(stats: StatsResponse) -> str:
    """Return a table of the cache, the tiers and the counters, as far as the response has them."""
    blocks = stats.blocks
    rows = [
        ("model", f"{stats.model} on {stats.device}"),
        ("  fingerprint", stats.model_fingerprint),
        ("uptime", f"{stats.uptime_s:.1f} s"),
        ("blocks", f"{blocks.total} of {stats.block_size} tokens, {stats.block_bytes} bytes each, {stats.kv_dtype}"),
    ]
    if stats.HasField("requests"):  # a single tenant may not see the rest
        rows += _global_rows(stats)
    for tier in stats.tiers:
        state = "" if tier.is_working else ", disabled"
        moved = f"{tier.loaded_blocks} loaded, {tier.missed_blocks} missed, {tier.saved_blocks} saved"
        stored = f"{tier.blocks} blocks, {tier.used_bytes} bytes; " if tier.HasField("blocks") else ""
        rows.append((f"tier {tier.tier}", f"{stored}{moved}{state}"))
    for tenant in stats.tenants:
        reused = percent(tenant.hit_tokens, tenant.hit_tokens + tenant.miss_tokens)
        in_tiers = "".join(f", {number} in {name}" for name, number in sorted(tenant.stored_blocks.items()) if number)
        use = f"{tenant.cached_blocks} blocks{in_tiers}, {tenant.hit_tokens} cached tokens{reused}"
        rows.append((f"tenant {tenant_label(tenant.tenant)}", use))
    if stats.known_tenants > len(stats.tenants):
        rows.append((f"{stats.known_tenants - len(stats.tenants)} smaller tenants", "by name: --tenant"))
    return "\n".join(align_columns(rows))


def _global_rows(stats: StatsResponse) -> list[tuple[str, str]]:
    blocks, requests, tokens = stats.blocks, stats.requests, stats.tokens
    return [
        ("  free", str(blocks.free)),
        ("  published", f"{blocks.published} ({blocks.pinned} pinned)"),
        ("  leased", str(blocks.leased)),
        ("  retained", f"{blocks.retained} of at most {blocks.retainable}"),
        ("  on probation", str(blocks.on_probation)),
        ("  evicted", f"{stats.evicted_blocks} so far ({stats.evicted_probation_blocks} on probation)"),
        ("requests", f"{requests.running} running, {requests.following} following, {requests.waiting} waiting"),
        ("  preempted", f"{requests.paused} ({requests.pauses} so far)"),
        ("  finished", str(requests.finished)),
        ("  failed", str(requests.failed)),
        ("  cancelled", str(requests.cancelled)),
        ("prompt tokens", str(tokens.prompt)),
        ("  cached", f"{tokens.cached}{percent(tokens.cached, tokens.prompt)}"),
        ("  computed", str(tokens.computed)),
        ("  written", str(tokens.written)),
        ("  recomputed", str(tokens.recomputed)),
        ("generated tokens", str(tokens.generated)),
        ("namespaces", str(stats.namespaces)),
        ("segments", str(stats.segments)),
        ("held leases", str(stats.held_leases)),
        *_state_rows(stats),
        *_part_rows(stats),
    ]


def _state_rows(stats: StatsResponse) -> list[tuple[str, str]]:
    states = stats.states
    if not stats.HasField("states"):
        return []
    return [
        ("state snapshots", f"{states.snapshots} of at most {states.max_snapshots}"),
        ("  evicted", str(states.given_up_snapshots)),
        ("  tokens recomputed without one", str(states.recomputed_tokens)),
    ]


def _part_rows(stats: StatsResponse) -> list[tuple[str, str]]:
    parts = stats.parts
    if not stats.HasField("parts"):
        return []
    return [
        ("parts for windowed layers", f"{parts.needed} needed, {parts.kept} kept, {parts.free} free"),
        ("  evicted", str(parts.given_up)),
        ("  hits shortened", f"{parts.shortened_hits}, by {parts.lost_tokens} tokens in all"),
    ]
