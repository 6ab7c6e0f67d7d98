"""`radixkv segments`: what is cached, a page at a time."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from radixkv.errors import ConfigError
from radixkv.service.cli import argument_types
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.output import json_of
from radixkv.service.cli.terminal import aligned
from radixkv.service.client import Client
from radixkv.v1.cache_pb2 import ListSegmentsResponse, Segment, StoredNamespace

_DEFAULT_PAGE_SIZE = 20
_STORED_HEAD = ("tenant", "namespace", "blocks", "tokens", "retained")
_HEAD = ("segment", "after", "tenant", "from", "tokens", "blocks", "uses", "idle", "heat", "state")


def add_segments_command(segments: argparse.ArgumentParser) -> None:
    """Add the arguments of `segments` to its parser."""
    segments.description = "List the cached segments, the runs of tokens that prompts share. Token ids are never shown."
    segments.add_argument(
        "--tenant", metavar="NAME", type=argument_types.name, help="only of this tenant (default: all)"
    )
    segments.add_argument(
        "--page-size", metavar="N", type=argument_types.count, default=_DEFAULT_PAGE_SIZE, help="segments per page"
    )
    segments.add_argument(
        "--page-token",
        metavar="TOKEN",
        type=argument_types.name,
        default="",
        help="the page to show, as printed below the one before it (default: the first)",
    )
    segments.add_argument("--hottest", action="store_true", help="only the hottest segments, on one page")
    segments.add_argument(
        "--store",
        metavar="NAME",
        type=argument_types.name,
        default="",
        help="list what this tier, such as host, holds of each namespace (default: the device)",
    )
    segments.add_argument("--all", action="store_true", help="all pages")
    add_connection(segments)
    segments.set_defaults(command=_segments)


def segment_rows(segments: Iterable[Segment]) -> list[tuple[str, ...]]:
    """Return a row of cells for each segment, below the names of the columns."""
    return [_HEAD, *map(_row, segments)]


def duration(seconds: float) -> str:
    """Return a time in the unit that it is read in: `7s`, `12m`, `5h`, `3d`."""
    for unit, length_s, next_s in (("s", 1, 60), ("m", 60, 3600), ("h", 3600, 86_400)):
        if seconds < next_s:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def _segments(arguments: argparse.Namespace) -> None:
    if arguments.hottest and (arguments.all or arguments.page_token or arguments.store):
        raise ConfigError("segments: expected --hottest, or pages by --all, --page-token or --store, got both")
    with client_of(arguments) as client:
        answer = _page(client, arguments, arguments.page_token)
        while arguments.all and answer.next_page_token:
            next_page = _page(client, arguments, answer.next_page_token)
            next_page.compared_segments += answer.compared_segments
            answer.ClearField("next_page_token")
            answer.MergeFrom(next_page)
    if arguments.json:
        print(json_of(answer))
    else:
        rows = _stored_rows(answer.stored) if arguments.store else segment_rows(answer.segments)
        summary = _summary(answer, "namespaces" if arguments.store else "segments")
        print("\n".join([*aligned(rows, is_right=True), summary]))


def _page(client: Client, arguments: argparse.Namespace, page_token: str) -> ListSegmentsResponse:
    return client.segments(
        tenant=arguments.tenant,
        page_size=arguments.page_size,
        page_token=page_token,
        hottest_first=arguments.hottest,
        store=arguments.store,
    )


def _summary(answer: ListSegmentsResponse, listed: str) -> str:
    total = f" of {answer.total_segments} {listed}" if answer.HasField("total_segments") else f" {listed}"
    more = f"; more with --page-token {answer.next_page_token}" if answer.next_page_token else ""
    return f"{len(answer.segments) + len(answer.stored)}{total}, {answer.compared_segments} looked at{more}"


def _row(segment: Segment) -> tuple[str, ...]:
    states = []
    if segment.num_leases:
        states.append(f"pinned by {segment.num_leases}")
    if segment.is_retained:
        ends = f" for {duration(segment.expires_in_s)}" if segment.HasField("expires_in_s") else ""
        states.append(f"retained at {segment.priority}{ends}")
    return (
        str(segment.segment_id),
        str(segment.parent_id) if segment.parent_id else "-",
        _owner(segment),
        str(segment.start_token),
        str(segment.num_tokens),
        str(segment.num_blocks),
        str(segment.num_uses),
        duration(segment.idle_s),
        f"{segment.heat:.1f}",
        ", ".join(states),
    )


def _stored_rows(stored: Iterable[StoredNamespace]) -> list[tuple[str, ...]]:
    return [_STORED_HEAD, *map(_stored_row, stored)]


def _stored_row(each: StoredNamespace) -> tuple[str, ...]:
    counts = (each.num_blocks, each.num_tokens, each.num_retained_blocks)
    return (_owner(each), f"{each.namespace_id:012x}", *map(str, counts))


def _owner(listed: Segment | StoredNamespace) -> str:
    """Return the tenant, and the names of the adapter or a part of its digest if it has none."""
    names = ", ".join(listed.adapter_names) or listed.adapter[:12]
    return (listed.tenant or "(none)") + (" +salt" if listed.has_salt else "") + (f" adapter {names}" if names else "")
