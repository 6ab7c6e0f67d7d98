"""Accounts what each tenant uses: token-seconds on the device and in tiers, evictions, and tokens, day by day."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping

from radixkv.api.statement import DAY_S, DayUse, Use
from radixkv.namespace import OTHER_TENANTS, PUBLIC_TENANT

MAX_LISTED_TENANTS = 1000
_MAX_CLOSED_DAYS = 31
_TENANTS_IN_SLICE = 128  # reading a tenant's use takes about 4 us

_NUM_TIERS = 4
DEVICE, HOST, DISK, REMOTE = range(_NUM_TIERS)
_TIERS = {"host": HOST, "disk": DISK}
_EVICTED_BY_SELF = ("device_evicted_by_self_tokens", "host_evicted_by_self_tokens", "disk_evicted_by_self_tokens")
_EVICTED_BY_OTHERS = (
    "device_evicted_by_others_tokens",
    "host_evicted_by_others_tokens",
    "disk_evicted_by_others_tokens",
)
_LOADED = {HOST: "host_loaded_tokens", DISK: "disk_loaded_tokens", REMOTE: "remote_loaded_tokens"}


def tier_of(store: str) -> int:
    """Return the tier of statements in which a store counts: `HOST` for `host`, `DISK` for `disk`, else `REMOTE`."""
    return _TIERS.get(store, REMOTE)


class _Meter:
    """The use of one tenant on the current day.

    Attributes:
        base: its use on this day that an earlier process has recorded.
        counts: its counters by name of the field of `Use`.
        num_blocks: blocks by tier.
        block_s: blocks times seconds by tier, up to the last `resize` or `use`.
    """

    __slots__ = ("_updated_s", "base", "block_s", "counts", "num_blocks")

    def __init__(self, now_s: float, base: Use) -> None:
        self.base = base
        self.counts: Counter[str] = Counter()
        self.num_blocks = [0] * _NUM_TIERS
        self.block_s = [0.0] * _NUM_TIERS
        self._updated_s = [now_s] * _NUM_TIERS

    def resize(self, tier: int, num_more_blocks: int, now_s: float) -> None:
        num_blocks = self.num_blocks[tier]
        self.block_s[tier] += num_blocks * (now_s - self._updated_s[tier])
        self._updated_s[tier] = now_s
        self.num_blocks[tier] = num_blocks + num_more_blocks

    def use(self, now_s: float, block_size: int) -> Use:
        for tier in range(_NUM_TIERS):
            self.resize(tier, 0, now_s)
        device, host, disk, remote = (block_s * block_size for block_s in self.block_s)
        own = Use(**self.counts, device_token_s=device, host_token_s=host, disk_token_s=disk, remote_token_s=remote)
        return self.base.plus(own)

    def begin_day(self) -> None:
        self.base = Use()
        self.counts.clear()
        self.block_s = [0.0] * _NUM_TIERS


class TenantLedger:
    """What each tenant uses, by day in UTC. Not thread-safe: the engine's thread owns it.

    A tenant's token-seconds are the integral of its number of blocks, in token slots: whenever the number changes, the
    blocks times the seconds since the last change are added. A block that is only partly filled counts as a whole one,
    because it takes the memory of one. On the device, all blocks count that have an owner: those in trees, those of
    running requests, and those of held leases. Public prefixes count for `PUBLIC_TENANT`; free blocks, and blocks whose
    memory windowed layers use, for no tenant. So the sum over the tenants is the integral of the pool's used blocks:

        blocks
          5 |      ______
          3 |_____|      |___      3 * 2 s + 5 * 2 s + 3 * 1 s = 19 block-seconds
            +-----------------▶ s
            0     2      4   5

    The number of tenants is bounded, since clients choose their names: on each day, tenants after the first
    `MAX_LISTED_TENANTS` are accounted together as `OTHER_TENANTS`. One that still has blocks on the next day may get an
    account of its own then.

    Args:
        block_size: tokens per block.
        tenants: tenants that always have an account of their own.
        clock: seconds, monotonic.
        unix_time: Unix time in seconds. It is read once, so that a clock that is set back repeats no day.
        read_day: returns what earlier processes have recorded for a day; it is called for the present day.

    Example:
        >>> clock = iter([0.0, 0.0, 2.0, 4.0, 5.0]).__next__
        >>> ledger = TenantLedger(16, clock=clock, unix_time=lambda: 86_400.0)
        >>> for num_more_blocks in (3, 2, -2):
        ...     ledger.resize("acme", DEVICE, num_more_blocks)
        >>> ledger.use_of("acme").device_token_s / 16
        19.0
    """

    def __init__(
        self,
        block_size: int,
        tenants: Collection[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        read_day: Callable[[int], DayUse | None] = lambda _: None,
    ) -> None:
        self._block_size = block_size
        self._always_listed = frozenset((*tenants, PUBLIC_TENANT, OTHER_TENANTS))
        self._clock = clock
        now_s = clock()
        self._epoch_s = unix_time() - now_s
        self.day = int((self._epoch_s + now_s) // DAY_S)
        self._day_end_s = self._end_of(self.day)
        before = read_day(self.day) or DayUse(0.0, {})
        self._covered_since_s = now_s - before.covered_s
        self._meters = {tenant: _Meter(now_s, use) for tenant, use in before.tenants.items()}
        for tenant in self._always_listed - set(self._meters):
            self._meters[tenant] = _Meter(now_s, Use())
        self._others = self._meters[OTHER_TENANTS]
        self._unlisted: dict[str, list[int]] = {}  # blocks by tier of the tenants that are accounted together
        self._closed_days: dict[int, DayUse] = {}

    def resize(self, tenant: str, tier: int, num_more_blocks: int) -> None:
        """Record that a tenant has this many more blocks in a tier. Complexity: O(1), and O(tenants) once per day."""
        now_s = self._now_s()
        meter = self._meter(tenant, now_s)
        if meter is self._others:
            blocks = self._unlisted.setdefault(tenant, [0] * _NUM_TIERS)
            blocks[tier] += num_more_blocks
            if not any(blocks):
                del self._unlisted[tenant]
        meter.resize(tier, num_more_blocks, now_s)

    def evict(self, tenant: str, tier: int, num_blocks: int, *, by_self: bool) -> None:
        """Record that a tier evicted blocks of a tenant; `resize` records that they are gone.

        Evictions of `REMOTE` are not counted: what shared stores evict is not known.

        Args:
            tenant: the owner of the blocks.
            tier: the tier that evicted them.
            num_blocks: number of blocks.
            by_self: whether they were evicted to make room for the tenant itself, or at its request.
        """
        if tier == REMOTE:
            return
        name = (_EVICTED_BY_SELF if by_self else _EVICTED_BY_OTHERS)[tier]
        self._meter(tenant, self._now_s()).counts[name] += num_blocks * self._block_size

    def load(self, tenant: str, num_tokens: Mapping[str, int]) -> None:
        """Record tokens that were loaded to the device, by the name of the store."""
        counts = self._meter(tenant, self._now_s()).counts
        for store, number in num_tokens.items():
            counts[_LOADED[tier_of(store)]] += number

    def count(self, tenant: str, numbers: Mapping[str, int]) -> None:
        """Add to integer fields of a tenant's `Use`, by name. Complexity: O(fields)."""
        self._meter(tenant, self._now_s()).counts.update(numbers)

    def use_of(self, tenant: str) -> Use:
        """Return what a tenant with an account of its own used so far today; zeros for others. Adds no account."""
        return self._use(tenant, self._now_s())

    def _use(self, tenant: str, now_s: float) -> Use:
        meter = self._meters.get(tenant)
        return Use() if meter is None else meter.use(now_s, self._block_size)

    def days(self, tenant: str | None = None) -> Generator[None, None, dict[int, DayUse]]:
        """Return the present day and the closed days that are not saved yet, in slices between which requests may run.

        All tenants of a slice are read at one time.

        Args:
            tenant: read only this tenant; None for all.

        Returns:
            The use by day. If the day ends between two slices, the present day is missing.
        """
        now_s = self._now_s()
        day = self.day
        uses: dict[str, Use] = {}
        names = [*self._meters] if tenant is None else [tenant]
        for index, name in enumerate(names):
            if index and index % _TENANTS_IN_SLICE == 0:
                yield
                now_s = self._now_s()
                if self.day != day:
                    return {**self._closed_days}
            use = self._use(name, now_s)
            if use != Use():
                uses[name] = use
        closed = {**self._closed_days}
        if tenant is not None:
            for past_day, day_use in closed.items():
                own_use = {tenant: day_use.tenants[tenant]} if tenant in day_use.tenants else {}
                closed[past_day] = DayUse(day_use.covered_s, own_use)
        return {**closed, day: DayUse(now_s - self._covered_since_s, uses)}

    def forget(self, days: Collection[int]) -> None:
        """Drop closed days that were saved."""
        for day in days:
            self._closed_days.pop(day, None)

    def _now_s(self) -> float:
        now_s = self._clock()
        while now_s >= self._day_end_s:
            self._close_day()
        return now_s

    def _meter(self, tenant: str, now_s: float) -> _Meter:
        meter = self._meters.get(tenant)
        if meter is not None:
            return meter
        if len(self._meters) - len(self._always_listed) >= MAX_LISTED_TENANTS or tenant in self._unlisted:
            return self._others
        meter = self._meters[tenant] = _Meter(now_s, Use())
        return meter

    def _close_day(self) -> None:
        """Keep the use of the day for `days`, and begin the next one with the blocks that each tenant has."""
        end_s = self._day_end_s
        uses = {tenant: meter.use(end_s, self._block_size) for tenant, meter in self._meters.items()}
        self._closed_days[self.day] = DayUse(
            end_s - self._covered_since_s, {tenant: use for tenant, use in uses.items() if use != Use()}
        )
        if len(self._closed_days) > _MAX_CLOSED_DAYS:  # nothing could be saved for so long
            del self._closed_days[min(self._closed_days)]
        self.day += 1
        self._day_end_s = self._end_of(self.day)
        self._covered_since_s = end_s
        self._meters = {
            tenant: meter
            for tenant, meter in self._meters.items()
            if tenant in self._always_listed or any(meter.num_blocks)
        }
        for meter in self._meters.values():
            meter.begin_day()
        self._list_more(end_s)

    def _list_more(self, now_s: float) -> None:
        """Give tenants that were accounted together accounts of their own, as far as there is room."""
        while self._unlisted and len(self._meters) - len(self._always_listed) < MAX_LISTED_TENANTS:
            tenant = next(iter(self._unlisted))
            blocks = self._unlisted.pop(tenant)
            meter = self._meters[tenant] = _Meter(now_s, Use())
            for tier, num_blocks in enumerate(blocks):
                self._others.resize(tier, -num_blocks, now_s)
                meter.resize(tier, num_blocks, now_s)

    def _end_of(self, day: int) -> float:
        return (day + 1) * DAY_S - self._epoch_s
