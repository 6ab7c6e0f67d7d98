"""A recount of what tenants use, for random walks."""

from __future__ import annotations

from collections import Counter

import pytest

from radixkv.api.statement import Use
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenant_ledger import TenantLedger


class UseOracle:
    """Adds up the block-seconds of each tenant and of the pool, and compares them with the ledger.

    The clock of a walk stands still during a step, so the number of blocks after a step is that until the next step.
    """

    def __init__(self, ledger: TenantLedger, block_size: int) -> None:
        self._ledger = ledger
        self._block_size = block_size
        self._last_verified_s = 0.0
        self._blocks: Counter[str] = Counter()  # by tenant
        self._num_pool_blocks = 0
        self._block_s: Counter[str] = Counter()
        self._pool_block_s = 0.0

    def verify(self, cache: PrefixCache, now_s: float) -> None:
        """Assert that the ledger is right after a step.

        `PrefixCache.check` must have been called before, since it recounts the blocks of each tenant.
        """
        passed_s, self._last_verified_s = now_s - self._last_verified_s, now_s
        for tenant, num_blocks in self._blocks.items():
            self._block_s[tenant] += num_blocks * passed_s
        self._pool_block_s += self._num_pool_blocks * passed_s
        tenants = dict(cache.tenants.items())
        self._blocks = Counter(
            {name: each.num_cached_blocks + each.num_leased_blocks for name, each in tenants.items()}
        )
        self._num_pool_blocks = cache.pool.num_leased + cache.pool.num_published
        uses = self._uses()
        size = self._block_size
        for tenant, usage in tenants.items():
            use = uses.pop(tenant, Use())
            assert use.device_token_s == pytest.approx(self._block_s[tenant] * size, abs=1e-6)
            num_evicted_tokens = use.device_evicted_by_self_tokens + use.device_evicted_by_others_tokens
            assert num_evicted_tokens == usage.num_evicted_blocks * size
        assert not uses, "the ledger has tenants that the cache does not know"
        assert sum(self._block_s.values()) == pytest.approx(self._pool_block_s, rel=1e-9)

    def _uses(self) -> dict[str, Use]:
        """Return what each tenant used on all days."""
        days = self._ledger.days()
        try:
            while True:
                next(days)
        except StopIteration as stop:
            uses: dict[str, Use] = {}
            for day in stop.value.values():
                for tenant, use in day.tenants.items():
                    uses[tenant] = uses.get(tenant, Use()).plus(use)
            return uses
