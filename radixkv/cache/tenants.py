"""Bounds of each tenant's share of the pool, and what it holds now."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

MAX_IDLE_TENANTS = 10_000
_MAX_COMPARED = 1024  # 0.7 ms

_V = TypeVar("_V")


class RecentTenants(OrderedDict[str, _V]):
    """Values by tenant, in the order in which tenants were added. Forgets idle tenants beyond `MAX_IDLE_TENANTS`.

    Tenants are named by callers, so their number has no bound of its own.

    Args:
        is_idle: whether a tenant may be forgotten, by its value.
    """

    def __init__(self, is_idle: Callable[[_V], bool] = lambda _: True) -> None:
        super().__init__()
        self._is_idle = is_idle

    def add(self, tenant: str, value: _V) -> None:
        """Add a tenant. If there are too many then, forget the oldest, or put it last if it is not idle.

        Complexity: O(1).
        """
        self[tenant] = value
        if len(self) > MAX_IDLE_TENANTS:
            oldest, old_value = self.popitem(last=False)
            if not self._is_idle(old_value):
                self[oldest] = old_value


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on one tenant's blocks.

    Attributes:
        floor_blocks: cached blocks that no other tenant can evict.
        ceiling_blocks: most blocks that it may hold, cached and leased together; None for the whole pool.
        max_retained_blocks: most blocks that may have a priority above the default; None for as many as of all tenants.
    """

    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    max_retained_blocks: int | None = None


class TenantUsage:
    """The blocks that one tenant holds now, and its totals since it was first seen.

    Attributes:
        quota: the bounds on its blocks.
        num_cached_blocks: published blocks.
        num_pinned_blocks: published blocks that leases keep from eviction.
        num_leased_blocks: blocks that belong to leases.
        num_retained_blocks: published blocks that are retained.
        num_evicted_blocks: blocks evicted so far.
        num_hit_tokens: tokens of leased prompts that were reused so far.
        num_miss_tokens: tokens of leased prompts that were not.
    """

    __slots__ = (
        "num_cached_blocks",
        "num_evicted_blocks",
        "num_hit_tokens",
        "num_leased_blocks",
        "num_miss_tokens",
        "num_pinned_blocks",
        "num_retained_blocks",
        "quota",
    )

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.num_cached_blocks = 0
        self.num_pinned_blocks = 0
        self.num_leased_blocks = 0
        self.num_retained_blocks = 0
        self.num_evicted_blocks = 0
        self.num_hit_tokens = 0
        self.num_miss_tokens = 0

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that no lease keeps from eviction."""
        return self.num_cached_blocks - self.num_pinned_blocks

    @property
    def num_blocks_for_others(self) -> int:
        """Evictable blocks above the floor, which other tenants may take."""
        return min(self.num_evictable_blocks, max(0, self.num_cached_blocks - self.quota.floor_blocks))

    @property
    def num_blocks_to_ceiling(self) -> int | None:
        """Blocks that it may still take if all its evictable ones are evicted; None without a ceiling."""
        if self.quota.ceiling_blocks is None:
            return None
        return self.quota.ceiling_blocks - self.num_leased_blocks - self.num_pinned_blocks


class Tenants:
    """Usage by tenant. A tenant without a quota is forgotten when it holds nothing and many others came after it.

    Args:
        quotas: by tenant.
    """

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self.with_quota = {tenant: TenantUsage(quota) for tenant, quota in quotas.items()}
        self._others: RecentTenants[TenantUsage] = RecentTenants(
            lambda usage: not (usage.num_cached_blocks or usage.num_leased_blocks)
        )

    def __getitem__(self, tenant: str) -> TenantUsage:
        usage = self.with_quota.get(tenant) or self._others.get(tenant)
        if usage is None:
            usage = TenantUsage(Quota())
            self._others.add(tenant, usage)
        return usage

    def items(self) -> list[tuple[str, TenantUsage]]:
        """List all known tenants."""
        return [*self.with_quota.items(), *self._others.items()]

    def largest(self, num_tenants: int) -> list[tuple[str, TenantUsage]]:
        """List the tenants that hold most cached blocks, the largest first.

        Those with a quota and the 1,024 most recent others are compared.

        Complexity: O(tenants with a quota + 1,024).
        """
        recent = ((tenant, self._others[tenant]) for tenant in reversed(self._others))
        compared = itertools.chain(self.with_quota.items(), itertools.islice(recent, _MAX_COMPARED))
        return heapq.nlargest(num_tenants, compared, key=lambda item: item[1].num_cached_blocks)

    def num_blocks_kept_from(self, tenant: str) -> int:
        """Count the evictable blocks that this tenant can't take because the floors of others protect them.

        Complexity: O(tenants with a quota).
        """
        return sum(
            usage.num_evictable_blocks - usage.num_blocks_for_others
            for other, usage in self.with_quota.items()
            if other != tenant
        )
