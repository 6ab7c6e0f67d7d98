"""The section of a tenant: its bounds and its share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from radixkv.config.bounds import Range, require_fields

_Count = Annotated[int, Range(0)]
_PositiveCount = Annotated[int, Range(1)]
_Rate = Annotated[float, Range(1e-3, 1e12)]


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """Bounds of one tenant, and its share of the steps.

    A section `tenants.NAME`, or `default_tenant` for each tenant that has no section of its own.

    Attributes:
        floor_tokens: cached tokens that no other tenant can evict; rounded up to whole blocks.
        ceiling_tokens: cached and leased tokens at most; rounded down to whole blocks. Without it, the whole pool.
        max_retained_tokens: tokens with a priority above the default at most; rounded down to whole blocks. Without it,
            what `cache.max_retained_share` leaves.
        max_held_tokens: tokens that its held leases keep at most; rounded down to whole blocks. Without it, half of
            what `cache.max_held_share` leaves to all.
        uses_public_prefixes: whether its prompts use public prefixes, which are computed once for all.
        weight: its share of the computed tokens while tenants compete, beside the others' weights of 1.
        max_calls_per_s: prefills and generations a second; more are refused with RESOURCE_EXHAUSTED. Without it, any
            number.
        max_computed_tokens_per_s: tokens computed a second; while more were, calls are refused. Cached tokens are free.
            Without it, any number.
        rate_burst_s: seconds of an unused rate that may be used at once.
    """

    floor_tokens: _Count = 0
    ceiling_tokens: _PositiveCount | None = None
    max_retained_tokens: _Count | None = None
    max_held_tokens: _Count | None = None
    uses_public_prefixes: bool = True
    weight: Annotated[float, Range(1e-3, 1e3)] = 1.0
    max_calls_per_s: _Rate | None = None
    max_computed_tokens_per_s: _Rate | None = None
    rate_burst_s: Annotated[float, Range(1e-3, 3600)] = 10.0

    def require(self, path: str) -> None:
        """Refuse values out of range; `Config` calls this, since only it knows the section's name.

        Args:
            path: `tenants.NAME` or `default_tenant`.

        Raises:
            ConfigError: the message names the key.
        """
        require_fields(path, self)
        if self.ceiling_tokens is not None:
            Range(self.floor_tokens).require(f"{path}.ceiling_tokens", self.ceiling_tokens)
