"""Quotas of tenants, and the blocks that each tenant has."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from radixkv.cache.tenant_ledger import DEVICE, TenantLedger
from radixkv.namespace import TRIAL_TENANT

MAX_IDLE_TENANTS = 10_000
_FORGOTTEN_AT_ONCE = 2
# Work of one listing on the engine's thread: comparing 1,024 tenants takes 0.25 ms, and reading 128 takes 0.25 ms.
_MAX_COMPARED = 1024
_MAX_LISTED = 128

_V = TypeVar("_V")


class RecentTenants(OrderedDict[str, _V]):
    """Values by tenant, the most recent last. Forgets idle tenants beyond `MAX_IDLE_TENANTS`.

    Clients choose the names of tenants, so without this bound their number could grow without limit. For each new
    tenant two old ones are examined, so the number falls again after a period in which very many were busy:

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
        """Examine the two oldest tenants if there are too many: drop those that are idle, move the others to the end.

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
        floor_blocks: cached blocks that other tenants cannot evict.
        ceiling_blocks: maximum number of blocks, cached and leased together; None for the whole pool.
        max_retained_blocks: maximum number of blocks with a priority above the default; None for the bound of all
            tenants.
        max_held_blocks: maximum number of blocks in held leases; None for half of the bound of all tenants.
        uses_public_prefixes: whether the tenant's prompts use the blocks of public prefixes.
    """

    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    max_retained_blocks: int | None = None
    max_held_blocks: int | None = None
    uses_public_prefixes: bool = True


class TenantUsage:
    """The blocks that one tenant has now, and its totals since it was first seen.

    Args:
        tenant: the tenant.
        quota: the bounds on its blocks.
        ledger: accounts its blocks for statements; None without statements.

    Attributes:
        quota: see above.
        num_cached_blocks: published blocks.
        num_pinned_blocks: published blocks that leases keep from eviction.
        num_probation_blocks: published blocks of leaves on probation that no lease uses.
        num_leased_blocks: blocks that belong to leases.
        num_retained_blocks: published blocks that are retained.
        num_held_blocks: blocks that held leases keep.
        num_evicted_blocks: blocks evicted so far.
        num_hit_tokens: tokens of leased prompts that were reused so far.
        num_miss_tokens: tokens of leased prompts that were not reused so far.
    """

    __slots__ = (
        "_ledger",
        "_tenant",
        "num_cached_blocks",
        "num_evicted_blocks",
        "num_held_blocks",
        "num_hit_tokens",
        "num_leased_blocks",
        "num_miss_tokens",
        "num_pinned_blocks",
        "num_probation_blocks",
        "num_retained_blocks",
        "quota",
    )

    def __init__(self, tenant: str, quota: Quota, ledger: TenantLedger | None = None) -> None:
        self._tenant = tenant
        self._ledger = ledger
        self.quota = quota
        self.num_cached_blocks = 0
        self.num_pinned_blocks = 0
        self.num_leased_blocks = 0
        self.num_retained_blocks = 0
        self.num_probation_blocks = 0
        self.num_held_blocks = 0
        self.num_evicted_blocks = 0
        self.num_hit_tokens = 0
        self.num_miss_tokens = 0

    def take(self, num_blocks: int) -> None:
        """Count blocks that a lease takes from the pool; a negative number returns them. Complexity: O(1)."""
        self.num_leased_blocks += num_blocks
        if self._ledger is not None:
            self._ledger.resize(self._tenant, DEVICE, num_blocks)

    def drop(self, num_blocks: int) -> None:
        """Count cached blocks that are freed. Complexity: O(1)."""
        self.num_cached_blocks -= num_blocks
        if self._ledger is not None:
            self._ledger.resize(self._tenant, DEVICE, -num_blocks)

    def evict(self, num_blocks: int, *, by_self: bool) -> None:
        """Count cached blocks that are evicted.

        Args:
            num_blocks: how many.
            by_self: whether they are evicted for the tenant itself.
        """
        self.num_evicted_blocks += num_blocks
        if self._ledger is not None:
            self._ledger.evict(self._tenant, DEVICE, num_blocks, by_self=by_self)
        self.drop(num_blocks)

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that no lease keeps from eviction."""
        return self.num_cached_blocks - self.num_pinned_blocks

    @property
    def num_blocks_for_others(self) -> int:
        """Evictable blocks above the floor, which may be evicted for other tenants."""
        return min(self.num_evictable_blocks, max(0, self.num_cached_blocks - self.quota.floor_blocks))

    @property
    def num_blocks_to_ceiling(self) -> int | None:
        """Blocks that the tenant may still allocate after evicting all that it can; None without a ceiling."""
        if self.quota.ceiling_blocks is None:
            return None
        return self.quota.ceiling_blocks - self.num_leased_blocks - self.num_pinned_blocks


class Tenants:
    """Usage by tenant. A tenant without a quota is forgotten if it has no blocks and many others were used since.

    Args:
        quotas: the quotas by tenant.
        default_quota: the bounds of every other tenant, without a floor. Not applied to `TRIAL_TENANT`.
        ledger: accounts what tenants use; None without statements.
    """

    def __init__(
        self, quotas: Mapping[str, Quota], default_quota: Quota | None = None, ledger: TenantLedger | None = None
    ) -> None:
        self.default_quota = default_quota or Quota()
        self._ledger = ledger
        self.with_quota = {tenant: TenantUsage(tenant, quota, ledger) for tenant, quota in quotas.items()}
        self._others: RecentTenants[TenantUsage] = RecentTenants(
            lambda usage: not (usage.num_cached_blocks or usage.num_leased_blocks)
        )

    def __len__(self) -> int:
        return len(self.with_quota) + len(self._others)

    def __getitem__(self, tenant: str) -> TenantUsage:
        """Return the usage of a tenant that is about to allocate blocks. Complexity: O(1)."""
        usage = self.with_quota.get(tenant)
        if usage is not None:
            return usage
        usage = self._others.get(tenant)
        if usage is None:
            usage = TenantUsage(tenant, self.quota_of(tenant), self._ledger)
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
        """Return the usage of a tenant; None if the tenant is unknown. Changes nothing."""
        return self.with_quota.get(tenant) or self._others.get(tenant)

    def items(self) -> list[tuple[str, TenantUsage]]:
        """List all known tenants. Complexity: O(tenants), of which there may be more than blocks."""
        return [*self.with_quota.items(), *self._others.items()]

    def largest(self, num_tenants: int) -> list[tuple[str, TenantUsage]]:
        """List the tenants with the most cached blocks, in descending order, 128 at most.

        Only tenants with a quota and the 1,024 most recently used others are compared.

        Complexity: O(tenants with a quota + 1,024).
        """
        recent = itertools.islice(reversed(self._others.items()), _MAX_COMPARED)
        compared = sorted(
            itertools.chain(self.with_quota.items(), recent), key=lambda item: item[1].num_cached_blocks, reverse=True
        )
        return compared[: min(num_tenants, _MAX_LISTED)]

    def num_blocks_kept_from(self, tenant: str) -> int:
        """Count the evictable blocks that this tenant cannot evict, because the floors of other tenants protect them.

        Complexity: O(tenants with a quota).
        """
        return sum(
            usage.num_evictable_blocks - usage.num_blocks_for_others
            for other, usage in self.with_quota.items()
            if other != tenant
        )
