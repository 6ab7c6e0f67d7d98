"""`radixkv statement` against a server of a fake engine."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from radixkv.api.statement import Use
from radixkv.errors import ConfigError
from radixkv.service.cli.prices import InvoiceItem, PriceList, total_of
from radixkv.service.cli.statement import statement_text
from radixkv.v1.cache_pb2 import StatementLine, StatementResponse
from tests.service.accounted import ACME, accounted_engine
from tests.service.command_line import run_cli, usage_error

PRICES = """
currency = "EUR"
decimals = 4
[per_million_tokens]
computed = 3.00
cached = 0.30
cached_host = 0.35
generated = 15
[per_million_token_hours]
device = 0.5
host = 0.05
"""
FIELDS = ["period", "tenant", *Use._fields]


@pytest.fixture
def prices(tmp_path: Path) -> str:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES, encoding="utf-8")
    return str(path)


def run(capsys, tmp_path: Path, *arguments: str, **tenants: Use) -> str:
    code, out, err = run_cli(capsys, accounted_engine(tmp_path / "statements", **tenants), "statement", *arguments)
    assert (code, err) == (0, "")
    return out


def test_a_table_lists_tenants_and_the_tiers_that_they_used(capsys, tmp_path: Path) -> None:
    lines = run(capsys, tmp_path, acme=ACME, _=Use(requests=1)).splitlines()
    assert lines[0] == "2026-11-01 to 2026-11-28 (UTC), of which 5m were accounted"
    assert lines[2].split("  ")[0] == "tenant"
    assert "host token-hours" in lines[2]
    assert "disk" not in lines[2]
    # The files of the days 1 and 28 cover 100 s and 200 s, and acme had 10 requests on day 1.
    assert [line.split() for line in lines[3:]] == [
        ["(none)", "2026-11", "1", "0", "0", "0", "0", "0", "0.0", "0.0"],
        ["acme", "2026-11", "13", "2,000,000", "6,500,000", "1,000", "32", "64", "1,000,000.0", "0.5"],
    ]


def test_a_line_says_what_twice_the_ceiling_would_have_saved(capsys, tmp_path: Path) -> None:
    out = run(capsys, tmp_path, acme=ACME._replace(more_hit_tokens_at_twice_ceiling=12_345), other=Use(requests=1))
    advice = "With twice its ceiling, acme would have saved about 12,345 more tokens in 2026-11."
    assert out.splitlines()[-2:] == ["", advice]


def test_without_use_there_is_no_table(capsys, tmp_path: Path) -> None:
    out = run(capsys, tmp_path, "--month", "2026-09")
    assert out == "2026-09-01 to 2026-09-30 (UTC), of which 0s were accounted. No use was recorded.\n"


def test_csv_has_all_fields_with_stable_names(capsys, tmp_path: Path) -> None:
    out = run(capsys, tmp_path, "--csv", "--by-day", "--tenant", "acme", acme=ACME, other=Use(requests=1))
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == FIELDS
    assert [(row["period"], row["tenant"], row["requests"]) for row in rows] == [
        ("2026-11-01", "acme", "10"),
        ("2026-11-28", "acme", "3"),
    ]
    assert Use(*[float(rows[1][name]) for name in Use._fields]) == ACME


def test_json_has_all_fields(capsys, tmp_path: Path) -> None:
    statement = json.loads(run(capsys, tmp_path, "--json", acme=ACME))
    assert (statement["since"], statement["until"], statement["covered_s"]) == ("2026-11-01", "2026-11-28", 300.0)
    assert set(statement["lines"][0]) == set(FIELDS)
    assert statement["lines"][0]["device_hit_tokens"] == 6_000_000


def test_an_invoice_has_a_line_for_each_price_and_an_exact_sum(capsys, tmp_path: Path, prices: str) -> None:
    statement = json.loads(run(capsys, tmp_path, "--json", "--prices", prices, acme=ACME))
    (line,) = statement["lines"]
    assert [(each["item"], each["quantity"], each["unit"], each["amount"]) for each in line["invoice"]] == [
        ("computed", 2_000_000, "tokens", "6.0000"),
        ("generated", 1000, "tokens", "0.0150"),
        ("cached_device", 6_000_000, "tokens", "1.8000"),
        ("cached_host", 500_000, "tokens", "0.1750"),
        ("resident_device", 3_600_000_000, "token_s", "0.5000"),
        ("resident_host", 1800, "token_s", "0.0000"),
    ]
    assert (statement["currency"], statement["amount"], line["amount"]) == ("EUR", "8.4900", "8.4900")


def test_csv_with_prices_is_the_invoice(capsys, tmp_path: Path, prices: str) -> None:
    rows = list(csv.DictReader(io.StringIO(run(capsys, tmp_path, "--csv", "--prices", prices, acme=ACME))))
    assert list(rows[0].values()) == [
        "2026-11", "acme", "computed", "2000000", "tokens", "3.00", "6.0000", "EUR",
    ]  # fmt: skip
    assert sum(Decimal(row["amount"]) for row in rows) == Decimal("8.4900")


def test_the_table_with_prices_ends_with_the_total(capsys, tmp_path: Path, prices: str) -> None:
    lines = run(capsys, tmp_path, "--prices", prices, acme=ACME).splitlines()
    assert lines[-1].split() == ["total", "8.4900"]
    assert "1,000,000.0 token-hours" in lines[-3]


def test_amounts_are_rounded_half_to_even_and_then_added() -> None:
    prices = PriceList.parse({"currency": "EUR", "per_million_tokens": {"computed": Decimal("0.1")}})
    amounts = [prices.invoice(StatementLine(computed_tokens=number))[0].amount for number in (50_000, 150_000, 150_001)]
    assert amounts == [Decimal("0.00"), Decimal("0.02"), Decimal("0.02")]  # of 0.005, 0.015 and 0.0150001
    items = [InvoiceItem("computed", 1, "tokens", Decimal(1), Decimal("0.10"))] * 3
    assert total_of(items, 2) == Decimal("0.30")
    assert f"{total_of([], 2):f}" == "0.00"


def test_large_amounts_lose_no_digit() -> None:
    prices = PriceList.parse(
        {"currency": "EUR", "decimals": 12, "per_million_tokens": {"computed": Decimal("123456789.123456789")}}
    )
    (item,) = prices.invoice(StatementLine(computed_tokens=2**64 - 1))
    exact = Fraction((2**64 - 1) * 123456789123456789, 10**15)
    assert abs(Fraction(item.amount) - exact) <= Fraction(1, 2 * 10**12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('currency = "EUR"\n[per_million_tokens]\ncomputd = 1', "per_million_tokens.computd: unknown key; the nearest "
         "is per_million_tokens.computed"),
        ('curency = "EUR"', "curency: unknown key; the nearest is currency"),
        ('currency = "EUR"\n[per_million_token_hours]\nredis = 1', "per_million_token_hours.redis: unknown key; the "
         "nearest is per_million_token_hours."),
        ('currency = "EUR"\n[per_milion_tokens]\ncomputed = 1', "per_milion_tokens: unknown key; the nearest is "
         "per_million_tokens"),
        ('currency = "EUR"\nper_million_tokens = 3', "per_million_tokens: expected a table of prices, got 3"),
        ('currency = "EUR"\n[per_million_tokens]\ncomputed = "3"', "tokens.computed: expected a price from 0"),
        ('currency = "EUR"\n[per_million_tokens]\ncomputed = -0.1', "expected a price from 0, such as 0.25, got"),
        ('currency = "EUR"\n[per_million_tokens]\ncomputed = nan', "expected a price from 0, such as 0.25, got"),
        ('currency = "EUR"\n[per_million_tokens]\ncomputed = true', "expected a price from 0, such as 0.25, got True"),
        ("[per_million_tokens]\ncomputed = 1", 'currency: expected a name such as "EUR", got \'\''),
        ('currency = "EUR"\ndecimals = 13', "decimals: expected 0 to 12, got 13"),
        ('currency = "EUR"', "expected at least one in per_million_tokens or per_million_token_hours, got none"),
        ("currency", "--prices: "),
    ],
)  # fmt: skip
def test_a_wrong_price_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        PriceList.load(str(path))
    assert message in str(refused.value)


def test_a_price_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prices: .*/none\.toml: No such file or directory"):
        PriceList.load(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--month", "November"), "argument --month: expected a month such as 2026-11, got November"),
        (("--since", "28.11.2026"), "argument --since: expected a day such as 2026-11-28, or a month such as 2026-11"),
    ],
)
def test_a_wrong_period_does_not_parse(capsys, arguments: tuple[str, ...], message: str) -> None:
    assert message in usage_error(capsys, "statement", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--month", "2026-11", "--until", "2026-11-02"), "--month: expected either a month, or --since and --until"),
        (("--csv", "--json"), "--csv: expected either --csv or --json, got both"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    capsys, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run_cli(capsys, accounted_engine(tmp_path), "statement", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_names_of_tenants_do_not_control_the_terminal() -> None:
    response = StatementResponse(lines=[StatementLine(period="2026-11", tenant="\x1b[2J", requests=1)])
    assert "\x1b" not in statement_text(response)
