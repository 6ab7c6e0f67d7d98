"""Bounds of each tenant's share of the pool, and what it holds now."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from radixkv.namespace import TRIAL_TENANT

MAX_IDLE_TENANTS = 10_000
_FORGOTTEN_AT_ONCE = 2
# Work of one list of tenants on the engine's thread: comparing takes 0.25 ms, reading 128 tenants 0.25 ms.
_MAX_COMPARED = 1024
_MAX_TOLD = 128

_V = TypeVar("_V")


class RecentTenants(OrderedDict[str, _V]):
    """Values by tenant, the most recent last. Forgets idle tenants beyond `MAX_IDLE_TENANTS`.

    Tenants are named by callers, so their number has no bound of its own. Two are looked at for each that comes, so
    that their number falls again after a time in which very many were busy:

        oldest [ idle | busy | ...... ] newest     ── forget_idle ──▶     [ ...... | busy ]

    Args:
        is_idle: whether a tenant may be forgotten, by its value.
    """

    def __init__(self, is_idle: Callable[[_V], bool] = lambda _: True) -> None:
        super().__init__()
        self._is_idle = is_idle

    def add(self, tenant: str, value: _V) -> None:
        """Add a tenant, after forgetting others if there are too many. Complexity: O(1)."""
        self.forget_idle()
        self[tenant] = value

    def forget_idle(self) -> None:
        """While there are too many tenants, look at the two oldest: forget those that are idle, put the others last.

        Complexity: O(1).
        """
        for _ in range(_FORGOTTEN_AT_ONCE):
            if len(self) < MAX_IDLE_TENANTS:
                return
            oldest, value = self.popitem(last=False)
            if not self._is_idle(value):
                self[oldest] = value


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on one tenant's blocks.

    Attributes:
        floor_blocks: cached blocks that no other tenant can evict.
        ceiling_blocks: most blocks that it may hold, cached and leased together; None for the whole pool.
        max_retained_blocks: most blocks that may have a priority above the default; None for as many as of all tenants.
        max_kept_blocks: most blocks that held leases may keep; None for half of those of all tenants.
        uses_public_prefixes: whether its prompts use the blocks of public prefixes.
    """

    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    max_retained_blocks: int | None = None
    max_kept_blocks: int | None = None
    uses_public_prefixes: bool = True


class TenantUsage:
    """The blocks that one tenant holds now, and its totals since it was first seen.

    Attributes:
        quota: the bounds on its blocks.
        num_cached_blocks: published blocks.
        num_pinned_blocks: published blocks that leases keep from eviction.
        num_probation_blocks: published blocks of leaves on probation that no lease uses.
        num_leased_blocks: blocks that belong to leases.
        num_retained_blocks: published blocks that are retained.
        num_kept_blocks: blocks that held leases keep.
        num_evicted_blocks: blocks evicted so far.
        num_hit_tokens: tokens of leased prompts that were reused so far.
        num_miss_tokens: tokens of leased prompts that were not.
    """

    __slots__ = (
        "num_cached_blocks",
        "num_evicted_blocks",
        "num_hit_tokens",
        "num_kept_blocks",
        "num_leased_blocks",
        "num_miss_tokens",
        "num_pinned_blocks",
        "num_probation_blocks",
        "num_retained_blocks",
        "quota",
    )

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.num_cached_blocks = 0
        self.num_pinned_blocks = 0
        self.num_leased_blocks = 0
        self.num_retained_blocks = 0
        self.num_probation_blocks = 0
        self.num_kept_blocks = 0
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
    """Usage by tenant. A tenant without a quota is forgotten when it holds nothing and many others were used after it.

    Args:
        quotas: by tenant.
        default_quota: the bounds of each tenant without a quota of its own, without a floor. The engine has none.
    """

    def __init__(self, quotas: Mapping[str, Quota], default_quota: Quota | None = None) -> None:
        self.default_quota = default_quota or Quota()
        self.with_quota = {tenant: TenantUsage(quota) for tenant, quota in quotas.items()}
        self._others: RecentTenants[TenantUsage] = RecentTenants(
            lambda usage: not (usage.num_cached_blocks or usage.num_leased_blocks)
        )

    def __len__(self) -> int:
        return len(self.with_quota) + len(self._others)

    def __getitem__(self, tenant: str) -> TenantUsage:
        """Return the usage of a tenant that is about to hold something. Complexity: O(1)."""
        usage = self.with_quota.get(tenant)
        if usage is not None:
            return usage
        usage = self._others.get(tenant)
        if usage is None:
            usage = TenantUsage(self.quota_of(tenant))
            self._others.add(tenant, usage)
        else:
            self._others.move_to_end(tenant)
            self._others.forget_idle()
        return usage

    def quota_of(self, tenant: str) -> Quota:
        """Return the bounds of a tenant. Changes nothing."""
        usage = self.with_quota.get(tenant)
        default_quota = Quota() if tenant == TRIAL_TENANT else self.default_quota
        return default_quota if usage is None else usage.quota

    def get(self, tenant: str) -> TenantUsage | None:
        """Return the usage of a tenant, None if it is not known. Changes nothing."""
        return self.with_quota.get(tenant) or self._others.get(tenant)

    def items(self) -> list[tuple[str, TenantUsage]]:
        """List all known tenants. Complexity: O(tenants), of which there may be as many as blocks."""
        return [*self.with_quota.items(), *self._others.items()]

    def largest(self, num_tenants: int) -> list[tuple[str, TenantUsage]]:
        """List the tenants that hold most cached blocks, the largest first, 128 at most.

        Those with a quota and the 1,024 others that were used last are compared.

        Complexity: O(tenants with a quota + 1,024).
        """
        recent = itertools.islice(reversed(self._others.items()), _MAX_COMPARED)
        compared = sorted(
            itertools.chain(self.with_quota.items(), recent), key=lambda item: item[1].num_cached_blocks, reverse=True
        )
        return compared[: min(num_tenants, _MAX_TOLD)]

    def num_blocks_kept_from(self, tenant: str) -> int:
        """Count the evictable blocks that this tenant can't take because the floors of others protect them.

        Complexity: O(tenants with a quota).
        """
        return sum(
            usage.num_evictable_blocks - usage.num_blocks_for_others
            for other, usage in self.with_quota.items()
            if other != tenant
        )
