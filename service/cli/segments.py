"""`radixkv segments`: lists what is cached, page by page."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError
from radixkv.service.cli.argument_types import count, name
from radixkv.service.cli.connection import TENANT, add_connection, client_of
from radixkv.service.cli.options import Option, add_options, flag
from radixkv.service.cli.output import json_of
from radixkv.service.cli.terminal import align_columns, duration, tenant_label
from radixkv.v1.cache_pb2 import ListSegmentsResponse, Segment, StoredNamespace
from radixkv.v1.hints_pb2 import Awaits

if TYPE_CHECKING:
    from radixkv.service.client import Client

_PAGE_SIZE = 20
_OPTIONS = (
    TENANT,
    Option("--page-size", "N", count, "segments per page", _PAGE_SIZE),
    Option("--page-token", "TOKEN", name, "page to show, as printed below the previous page (default: the first)", ""),
    flag("--hottest", "only the hottest segments, on one page"),
    Option(
        "--store",
        "NAME",
        name,
        "list the blocks of each namespace in this tier, such as host (default: the device)",
        "",
    ),
    Option("--session", "ID", name, "only what no session but this one of --tenant has used (default: all)", ""),
    flag("--all", "show all pages"),
)
_STORED_HEADER = ("tenant", "namespace", "blocks", "tokens", "retained")
_HEADER = ("segment", "after", "tenant", "from", "tokens", "blocks", "uses", "idle", "heat", "state")


def add_arguments(segments: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    segments.description = "List the cached segments, the nodes of the radix trees. Token ids are never shown."
    add_options(segments, _OPTIONS)
    add_connection(segments)
    segments.set_defaults(command=_segments)


def segment_rows(segments: Iterable[Segment]) -> list[tuple[str, ...]]:
    """Return a header and one row of cells per segment."""
    return [_HEADER, *map(_row, segments)]


def awaits_text(awaits: Awaits) -> str:
    """Return what a session waits for; empty if it is not known."""
    texts = {
        Awaits.AWAITS_TOOL: "awaits a tool",
        Awaits.AWAITS_USER: "awaits the user",
        Awaits.AWAITS_NOTHING: "ended",
    }
    return texts.get(awaits, "")


def _segments(arguments: argparse.Namespace) -> None:
    if arguments.hottest and (arguments.all or arguments.page_token or arguments.store):
        raise ConfigError("segments: --hottest can't be combined with --all, --page-token or --store")
    if arguments.session and (arguments.hottest or arguments.page_token or arguments.store):
        raise ConfigError("segments: --session can't be combined with --hottest, --page-token or --store")
    with client_of(arguments) as client:
        response = _fetch_page(client, arguments, arguments.page_token)
        while arguments.all and response.next_page_token:
            next_page = _fetch_page(client, arguments, response.next_page_token)
            next_page.compared_segments += response.compared_segments
            response.ClearField("next_page_token")
            response.MergeFrom(next_page)
    if arguments.json:
        print(json_of(response))
    else:
        rows = _stored_rows(response.stored) if arguments.store else segment_rows(response.segments)
        summary = _summary(response, "namespaces" if arguments.store else "segments")
        print("\n".join([*align_columns(rows, is_right=True), summary]))


def _fetch_page(client: Client, arguments: argparse.Namespace, page_token: str) -> ListSegmentsResponse:
    return client.segments(
        tenant=arguments.tenant or ("" if arguments.session else None),
        page_size=arguments.page_size,
        page_token=page_token,
        hottest_first=arguments.hottest,
        store=arguments.store,
        session_id=arguments.session,
    )


def _summary(response: ListSegmentsResponse, noun: str) -> str:
    total = f" of {response.total_segments} {noun}" if response.HasField("total_segments") else f" {noun}"
    more = f"; more with --page-token {response.next_page_token}" if response.next_page_token else ""
    return f"{len(response.segments) + len(response.stored)}{total}, {response.compared_segments} examined{more}"


def _row(segment: Segment) -> tuple[str, ...]:
    states = []
    if segment.num_leases:
        states.append(f"pinned by {segment.num_leases}")
    if segment.is_retained:
        ends = f" for {duration(segment.expires_in_s)}" if segment.HasField("expires_in_s") else ""
        states.append(f"retained at {segment.priority}{ends}")
    if segment.session_id:
        states += [f"only session {segment.session_id}", awaits_text(segment.awaits)]
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
        ", ".join(filter(None, states)),
    )


def _stored_rows(stored: Iterable[StoredNamespace]) -> list[tuple[str, ...]]:
    return [_STORED_HEADER, *map(_stored_row, stored)]


def _stored_row(each: StoredNamespace) -> tuple[str, ...]:
    counts = (each.num_blocks, each.num_tokens, each.num_retained_blocks)
    return (_owner(each), f"{each.namespace_id:012x}", *map(str, counts))


def _owner(listed: Segment | StoredNamespace) -> str:
    """Return the tenant and the adapter; the beginning of the adapter's digest if it has no name."""
    names = ", ".join(listed.adapter_names) or listed.adapter[:12]
    return tenant_label(listed.tenant) + (" +salt" if listed.has_salt else "") + (f" adapter {names}" if names else "")
