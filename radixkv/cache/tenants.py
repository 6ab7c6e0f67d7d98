"""What each tenant may hold of the pool, and what it holds now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

_MAX_IDLE_TENANTS = 10_000


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
        self._others: OrderedDict[str, TenantUsage] = OrderedDict()

    def __getitem__(self, tenant: str) -> TenantUsage:
        usage = self.with_quota.get(tenant) or self._others.get(tenant)
        if usage is None:
            usage = self._others[tenant] = TenantUsage(Quota())
            self._forget_idle()
        return usage

    def items(self) -> list[tuple[str, TenantUsage]]:
        """List all known tenants."""
        return [*self.with_quota.items(), *self._others.items()]

    def num_blocks_kept_from(self, tenant: str) -> int:
        """Count the evictable blocks that this tenant can't take because the floors of others protect them.

        Complexity: O(tenants with a quota).
        """
        return sum(
            usage.num_evictable_blocks - usage.num_blocks_for_others
            for other, usage in self.with_quota.items()
            if other != tenant
        )

    def _forget_idle(self) -> None:
        """Look at the oldest tenant: forget it, or put it last if it still holds something."""
        if len(self._others) > _MAX_IDLE_TENANTS:
            tenant, usage = self._others.popitem(last=False)
            if usage.num_cached_blocks or usage.num_leased_blocks:
                self._others[tenant] = usage
