"""Prices of what tenants use, and the lines of an invoice."""

from __future__ import annotations

import decimal
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from radixkv.config.config import require_known
from radixkv.errors import ConfigError
from radixkv.v1.cache_pb2 import StatementLine

_MILLION = 1_000_000
HOUR_S = 3600
_MAX_DECIMALS = 12
TIERS = ("device", "host", "disk", "remote")
"""The tiers of a statement, as its fields name them."""
_TOKENS = "per_million_tokens"
_TOKEN_HOURS = "per_million_token_hours"
# The items that are priced by tokens, each with the field of a statement that has its quantity.
_TOKEN_FIELDS = {
    "computed": "computed_tokens",
    "generated": "generated_tokens",
    "written": "written_tokens",
    **{f"cached_{tier}": f"{tier}_hit_tokens" for tier in TIERS},
}
_KEYS = (
    "currency",
    "decimals",
    *(f"{_TOKENS}.{name}" for name in ("cached", *_TOKEN_FIELDS)),
    *(f"{_TOKEN_HOURS}.{tier}" for tier in TIERS),
)
# Enough digits for every product of a 64-bit number and a price, so that an amount is rounded only once.
_EXACT = decimal.Context(prec=80, rounding=decimal.ROUND_HALF_EVEN)


class InvoiceItem(NamedTuple):
    """One line of an invoice.

    Attributes:
        item: `computed`, `cached_host`, `resident_device`, ...
        quantity: tokens or token-seconds, a whole number.
        unit: `tokens` or `token_s`.
        price_per_million: price of a million tokens or token-hours.
        amount: the price of the quantity, rounded to the decimals of the price list.
    """

    item: str
    quantity: int
    unit: str
    price_per_million: Decimal
    amount: Decimal


class PriceList(NamedTuple):
    """Prices in one currency.

    Attributes:
        currency: its name.
        decimals: digits after the point of an amount. Each amount is rounded, half to even; a sum adds rounded amounts.
        per_million_tokens: the price of a million tokens by item.
        per_million_token_hours: the price of a million token-hours by tier.
    """

    currency: str
    decimals: int
    per_million_tokens: Mapping[str, Decimal]
    per_million_token_hours: Mapping[str, Decimal]

    @classmethod
    def load(cls, path: str) -> PriceList:
        """Read a TOML file.

        Raises:
            ConfigError: the file cannot be read, a key is unknown (the message names the nearest one), or a value is
                wrong.
        """
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"), parse_float=Decimal)
        except OSError as error:
            raise ConfigError(f"--prices: {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prices: {path}: expected UTF-8, got other bytes") from error
        except (ValueError, RecursionError, decimal.InvalidOperation) as error:
            raise ConfigError(f"--prices: {path}: {error}") from error
        return cls.parse(tree)

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> PriceList:
        """Check the keys and the values of a file; see `load`."""
        for name, value in tree.items():
            if isinstance(value, Mapping) and name in (_TOKENS, _TOKEN_HOURS):
                for key in value:
                    require_known(f"{name}.{key}", _KEYS)
            elif name in (_TOKENS, _TOKEN_HOURS):
                raise ConfigError(f"{name}: expected a table of prices, got {value!r}")
            else:
                require_known(name, [*_KEYS, _TOKENS, _TOKEN_HOURS])
        currency, decimals = tree.get("currency", ""), tree.get("decimals", 2)
        if not isinstance(currency, str) or not currency:
            raise ConfigError(f'currency: expected a name such as "EUR", got {currency!r}')
        if isinstance(decimals, bool) or not isinstance(decimals, int) or not 0 <= decimals <= _MAX_DECIMALS:
            raise ConfigError(f"decimals: expected 0 to {_MAX_DECIMALS}, got {decimals!r}")
        tokens = {name: _price(f"{_TOKENS}.{name}", price) for name, price in tree.get(_TOKENS, {}).items()}
        token_hours = {
            name: _price(f"{_TOKEN_HOURS}.{name}", price) for name, price in tree.get(_TOKEN_HOURS, {}).items()
        }
        cached = tokens.pop("cached", None)
        if cached is not None:
            tokens = {**{f"cached_{tier}": cached for tier in TIERS}, **tokens}
        if not tokens and not token_hours:
            raise ConfigError(f"prices: expected at least one in {_TOKENS} or {_TOKEN_HOURS}, got none")
        return cls(currency, decimals, tokens, token_hours)

    def invoice(self, line: StatementLine) -> list[InvoiceItem]:
        """Return the items of a line of a statement that have a price and a quantity."""
        items = []
        for item, field in _TOKEN_FIELDS.items():
            quantity, price = getattr(line, field), self.per_million_tokens.get(item)
            if price is not None and quantity:
                items.append(InvoiceItem(item, quantity, "tokens", price, self._amount(quantity, price, 1)))
        for tier in TIERS:
            quantity, price = round(getattr(line, f"{tier}_token_s")), self.per_million_token_hours.get(tier)
            if price is not None and quantity:
                amount = self._amount(quantity, price, HOUR_S)
                items.append(InvoiceItem(f"resident_{tier}", quantity, "token_s", price, amount))
        return items

    def _amount(self, quantity: int, price: Decimal, divisor: int) -> Decimal:
        """Return the rounded amount for a quantity; `price` is that of a million times `divisor`."""
        exact = _EXACT.divide(_EXACT.multiply(Decimal(quantity), price), Decimal(_MILLION * divisor))
        return exact.quantize(Decimal(1).scaleb(-self.decimals), context=_EXACT)


def total_of(items: list[InvoiceItem], decimals: int) -> Decimal:
    """Return the exact sum of the amounts."""
    with decimal.localcontext(_EXACT):
        return sum((each.amount for each in items), Decimal(0).scaleb(-decimals))


def _price(path: str, value: Any) -> Decimal:
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    if not is_number or not Decimal(value).is_finite() or not 0 <= value < 10**15:
        raise ConfigError(f"{path}: expected a price from 0, such as 0.25, got {value!r}")
    return Decimal(value)
