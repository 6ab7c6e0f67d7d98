"""`radixkv statement`: lists what each tenant used in a month or in a range of days, and what it costs."""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from radixkv.errors import ConfigError
from radixkv.service.cli.argument_types import name
from radixkv.service.cli.connection import TENANT, add_connection, client_of
from radixkv.service.cli.options import Option, add_options, flag
from radixkv.service.cli.output import json_of
from radixkv.service.cli.prices import HOUR_S, TIERS, InvoiceItem, PriceList, total_of
from radixkv.service.cli.terminal import align_columns, duration, printable, tenant_label
from radixkv.v1.cache_pb2 import StatementLine, StatementResponse

_FIELDS = tuple(field.name for field in StatementLine.DESCRIPTOR.fields)


def _month(text: str) -> str:
    """Parse a month."""
    return _match(text, r"[0-9]{4}-[0-9]{2}", "a month such as 2026-11")


def _day(text: str) -> str:
    """Parse a day or a month. The service checks that it exists."""
    return _match(text, r"[0-9]{4}-[0-9]{2}(-[0-9]{2})?", "a day such as 2026-11-28, or a month such as 2026-11")


def _match(text: str, pattern: str, expected: str) -> str:
    if not re.fullmatch(pattern, text):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text[:40] or 'an empty string'}")
    return text


_OPTIONS = (
    TENANT,
    Option("--month", "YYYY-MM", _month, "the month, in UTC (default: the current month)"),
    Option("--since", "DAY", _day, "first day, instead of --month (default: the first day of the month of --until)"),
    Option("--until", "DAY", _day, "last day, instead of --month (default: today)"),
    flag("--by-day", "a line for each day instead of for each month"),
    Option("--prices", "FILE", name, "TOML file with prices, for an invoice; see docs/STATEMENTS.md (default: none)"),
    flag("--csv", "print CSV; with --prices, the lines of the invoice"),
)


def add_arguments(statement: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    statement.description = (
        "List what each tenant used of the cache in a month or in a range of days: tokens computed, saved by hits and "
        "generated, evictions, and token-hours on the device and in each tier."
    )
    add_options(statement, _OPTIONS)
    add_connection(statement)
    statement.set_defaults(command=_statement)


def _statement(arguments: argparse.Namespace) -> None:
    if arguments.month is not None and (arguments.since is not None or arguments.until is not None):
        raise ConfigError("--month: expected either a month, or --since and --until, got both")
    if arguments.csv and arguments.json:
        raise ConfigError("--csv: expected either --csv or --json, got both")
    prices = None if arguments.prices is None else PriceList.load(arguments.prices)
    with client_of(arguments) as client:
        statement = client.statement(
            since=arguments.month or arguments.since or "",
            until=arguments.month or arguments.until or "",
            tenant=arguments.tenant,
            by_day=arguments.by_day,
        )
    if arguments.json:
        print(statement_json(statement, prices))
    elif arguments.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(_csv_rows(statement, prices))
    else:
        print(statement_text(statement, prices))


def statement_json(statement: StatementResponse, prices: PriceList | None) -> str:
    """Return a statement as JSON; with prices, each line has its invoice. Prices and amounts are strings."""
    if prices is None:
        return json_of(statement)
    tree = json.loads(json_of(statement))
    items: list[InvoiceItem] = []
    for line, fields in zip(statement.lines, tree["lines"], strict=True):
        line_items = prices.invoice(line)
        items += line_items
        fields["invoice"] = [_item_fields(each) for each in line_items]
        fields["amount"] = f"{total_of(line_items, prices.decimals):f}"
    tree["currency"] = prices.currency
    tree["amount"] = f"{total_of(items, prices.decimals):f}"
    return json.dumps(tree, indent=2)


def _item_fields(item: InvoiceItem) -> dict[str, Any]:
    return {**item._asdict(), "price_per_million": f"{item.price_per_million:f}", "amount": f"{item.amount:f}"}


def _csv_rows(statement: StatementResponse, prices: PriceList | None) -> Iterator[Sequence[object]]:
    """Yield the header, and a row for each line; with prices, a row for each item of the invoices."""
    if prices is None:
        yield _FIELDS
        for line in statement.lines:
            yield [getattr(line, field) for field in _FIELDS]
        return
    yield ("period", "tenant", *InvoiceItem._fields, "currency")
    for line in statement.lines:
        for item in prices.invoice(line):
            yield (line.period, line.tenant, *_item_fields(item).values(), prices.currency)


def statement_text(statement: StatementResponse, prices: PriceList | None = None) -> str:
    """Return a statement as tables to read."""
    accounted = duration(statement.covered_s)
    range_text = f"{statement.since} to {statement.until} (UTC), of which {accounted} were accounted"
    if not statement.lines:
        return f"{range_text}. No use was recorded."
    lines = [range_text, "", *align_columns(list(_rows(statement)), is_right=True)]
    ceiling_notes = [_ceiling_note(line) for line in statement.lines if line.more_hit_tokens_at_twice_ceiling]
    if ceiling_notes:
        lines += ["", *ceiling_notes]
    if prices is not None:
        lines += ["", *_invoice_text(statement, prices)]
    return "\n".join(lines)


def _rows(statement: StatementResponse) -> Iterator[tuple[str, ...]]:
    """Yield the header, and a row for each line, with the tiers that any tenant used."""
    tiers = [tier for tier in TIERS if any(getattr(line, f"{tier}_token_s") for line in statement.lines)]
    counts = ("requests", "computed", "saved by hits", "generated", "evicted by itself", "by others")
    yield ("tenant", "period", *counts, *(f"{tier} token-hours" for tier in tiers))
    for line in statement.lines:
        saved, by_self, by_others = (
            sum(getattr(line, f"{tier}_{name}_tokens", 0) for tier in TIERS)
            for name in ("hit", "evicted_by_self", "evicted_by_others")
        )
        numbers = (line.requests, line.computed_tokens, saved, line.generated_tokens, by_self, by_others)
        hours = (f"{getattr(line, f'{tier}_token_s') / HOUR_S:,.1f}" for tier in tiers)
        yield (tenant_label(line.tenant), line.period, *(f"{number:,}" for number in numbers), *hours)


def _ceiling_note(line: StatementLine) -> str:
    tenant, num_tokens = printable(tenant_label(line.tenant), keep=""), line.more_hit_tokens_at_twice_ceiling
    return f"With twice its ceiling, {tenant} would have saved about {num_tokens:,} more tokens in {line.period}."


def _invoice_text(statement: StatementResponse, prices: PriceList) -> Iterator[str]:
    rows = [("tenant", "period", "item", "quantity", f"{prices.currency} per million", prices.currency)]
    items: list[InvoiceItem] = []
    for line in statement.lines:
        for item in prices.invoice(line):
            items.append(item)
            is_time = item.unit == "token_s"
            quantity = f"{item.quantity / HOUR_S:,.1f} token-hours" if is_time else f"{item.quantity:,} tokens"
            cells = (tenant_label(line.tenant), line.period, item.item, quantity)
            rows.append((*cells, f"{item.price_per_million:f}", f"{item.amount:f}"))
    rows.append(("total", "", "", "", "", f"{total_of(items, prices.decimals):f}"))
    yield from align_columns(rows, is_right=True)
