"""The option `--tier`: names and sizes of the tiers below the device."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from radixkv.planning.tiers import TierCapacity, check_tiers, tier_capacity_tokens
from radixkv.service.cli.argument_types import positive_number, whole
from radixkv.service.cli.options import Option

UNBOUNDED = "unbounded"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_BYTES = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)([kmgt]i?)?b", re.IGNORECASE)
_POWERS = "kmgt"
_MAX_BYTES = 2**60  # larger numbers are typing errors


@dataclass(frozen=True, slots=True)
class TierSize:
    """The size of a tier on the command line: in bytes, in tokens, or unbounded if both are None.

    Attributes:
        name: name of the tier.
        num_bytes: size in bytes, or None.
        num_tokens: size in tokens, or None.
    """

    name: str
    num_bytes: int | None = None
    num_tokens: int | None = None


def tier_option(effect: str = "") -> Option:
    """Return the option `--tier`; `effect` is the part of its help that says what the command prints."""
    return Option(
        "--tier",
        "NAME=SIZE[,...]",
        tier_sizes,
        "tiers for blocks that are evicted from the device, the fastest first, such as host=16GB,disk=200GB; a size is "
        f"in bytes (16GB, 16GiB), in tokens (10.24M), or {UNBOUNDED}{effect} (default: none)",
        [],
        {"dest": "tiers", "action": "extend"},
    )


def tier_sizes(text: str) -> list[TierSize]:
    """Parse comma-separated names and sizes of tiers."""
    return [_tier_size(name, size) for name, size in _pairs(text)]


def tier_numbers(text: str) -> dict[str, float]:
    """Parse comma-separated names of tiers, each with a positive number."""
    return {name: positive_number(number) for name, number in _pairs(text)}


def tier_capacities(
    sizes: Sequence[TierSize], token_bytes_of: Callable[[str], int], block_size: int
) -> list[TierCapacity]:
    """Return the capacities of tiers in tokens.

    Args:
        sizes: values of `--tier`.
        token_bytes_of: returns the K/V bytes per token; its argument names the option that needs them in errors.
        block_size: tokens per block.

    Raises:
        ConfigError: a size is in bytes without a model, two tiers have one name, or a tier is smaller than a block.
    """
    capacities = []
    for size in sizes:
        num_tokens = size.num_tokens
        if size.num_bytes is not None:
            token_bytes = token_bytes_of(f"--tier {size.name} in bytes")
            num_tokens = tier_capacity_tokens(size.name, size.num_bytes, token_bytes, block_size)
        capacities.append(TierCapacity(size.name, num_tokens))
    check_tiers(capacities, block_size)
    return capacities


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for item in text.split(","):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not (separator and _NAME.fullmatch(name) and name != "device"):
            raise argparse.ArgumentTypeError(
                f"expected NAME=VALUE with names such as host and disk, other than device; got {item.strip() or 'none'}"
            )
        pairs.append((name, value))
    return pairs


def _tier_size(name: str, text: str) -> TierSize:
    if text.lower() == UNBOUNDED:
        return TierSize(name)
    match = _BYTES.fullmatch(text)
    if match is None:
        return TierSize(name, num_tokens=whole(text))
    unit = (match[2] or "").lower()
    power = _POWERS.index(unit[0]) + 1 if unit else 0
    num_bytes = int(Decimal(match[1]) * (1024 if unit.endswith("i") else 1000) ** power)
    if not 1 <= num_bytes <= _MAX_BYTES:
        raise argparse.ArgumentTypeError(f"expected 1 to {_MAX_BYTES} bytes, got {text}")
    return TierSize(name, num_bytes=num_bytes)
