"""The index of one tier: which blocks it holds, and in which order it evicts them."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.api.segments import StoredPage
from radixkv.cache.tenant_ledger import TenantLedger, tier_of
from radixkv.namespace import Namespace
from radixkv.offload.index.namespace_keys import NamespaceKeys
from radixkv.offload.index.prompt_blocks import KeyedBlock

_ON_DEVICE = -1  # below every priority


class StoreListener:
    """Is notified of the blocks that tiers hold. The methods do nothing; override those of interest.

    Attributes:
        is_on: whether to call `identified`; the other methods are always called. If it is true, the engine also checks
            for finished saves while it is idle.
    """

    is_on = False

    def identified(self, namespace: Namespace, tokens: bytes, start: int, blocks: Sequence[KeyedBlock]) -> None:
        """Handle consecutive blocks of a prompt that are stored, or may be stored soon.

        This is the only notification with the tokens of a key.

        Args:
            namespace: namespace of the prompt, without a public prefix.
            tokens: the prompt as the cache stores it, at least up to the end of these blocks.
            start: index of the first of them in the prompt.
            blocks: their keys.
        """

    def stored(self, store: str, key: bytes) -> None:
        """Handle that a tier holds a block. May be called again for the same block."""

    def removed(self, store: str, key: bytes) -> None:
        """Handle that a tier no longer holds a block, never stored it, or, if it is shared, may not hold it."""


class EvictionRank(NamedTuple):
    """Position of a key in the eviction order of a tier. The lowest is evicted first.

    Attributes:
        level: keys of a lower level are evicted before those of a higher one.
        turn: orders the keys of a level, lowest first. Unique.
        key: key of the block.
    """

    level: int
    turn: int
    key: bytes


class EvictionOrder:
    """Keys in eviction order: by level, and in LRU order within a level.

        level -1  [ a  b ]      level 50  [ c  d  e ]      level 90  [ f ]
                    evicted first                                     evicted last

    Complexity: O(levels), except for the iteration over all keys.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[bytes, int]] = {}
        self._level_of: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[EvictionRank]:
        """Iterate in eviction order."""
        for level in sorted(self._levels):
            for key, turn in self._levels[level].items():
                yield EvictionRank(level, turn, key)

    @property
    def first(self) -> EvictionRank | None:
        """The key that is evicted first; None if there are no keys."""
        if not self._levels:
            return None
        level = min(self._levels)
        key, turn = next(iter(self._levels[level].items()))
        return EvictionRank(level, turn, key)

    def level_of(self, key: bytes) -> int:
        """Return the level of a key, which must be present."""
        return self._level_of[key]

    def put_last(self, key: bytes, level: int, turn: int) -> None:
        """Insert or move a key behind all others of a level. `turn` must be higher than theirs."""
        self.remove(key)
        self._levels.setdefault(level, OrderedDict())[key] = turn
        self._level_of[key] = level

    def put_first(self, key: bytes, level: int, turn: int) -> None:
        """Insert or move a key before all others of a level. `turn` must be lower than theirs."""
        self.put_last(key, level, turn)
        self._levels[level].move_to_end(key, last=False)

    def remove(self, key: bytes) -> None:
        """Remove a key if it is present."""
        level = self._level_of.pop(key, None)
        if level is None:
            return
        del self._levels[level][key]
        if not self._levels[level]:
            del self._levels[level]


class TierShares(NamedTuple):
    """Fractions of a tier's capacity, 0 to 1, that apply to one tenant.

    Attributes:
        floor: other tenants can't evict the tenant's blocks below this.
        ceiling: the tenant can't hold more than this, or than one block if this is less; None for no limit.
        retained: at most this fraction may hold blocks of the tenant with a priority above the default.
    """

    floor: float = 0.0
    ceiling: float | None = None
    retained: float = 1.0


class TierIndex:
    """The blocks that a tier holds, in eviction order, known without asking the store.

        evicted first  [ also on the device )[ priority 0 ) ... [ priority 50 ) ... [ priority 100 )  evicted last
                         least recently loaded first              least recently evicted from the device first

    A block is pending from `add` or `begin_rewrite` until `note_stored`, and can't be loaded in the meantime.

    A block that is also on the device is not needed in the tier until the device evicts it. If the tier still holds it
    then, it need not be written again.

    Args:
        name: name of the tier, such as `host`.
        num_blocks: its capacity in blocks.
        shares_of: returns the shares of a tenant, always the same ones.
        retained_share: fraction of the capacity that blocks with a priority above the default may take.
        ledger: accounts the blocks of each tenant; None without statements.

    Attributes:
        name, num_blocks, retained_share: the arguments.
        owned: all keys by namespace.
        retained: the keys with a priority above the default by namespace, without those of blocks that are also on the
            device.
        is_shared: whether other servers use the store too; see `SharedTierIndex`.
        partless: keys of blocks that are stored without their parts of windowed layers
            (`radixkv/cache/windowed_layers.md`).
    """

    is_shared = False

    def __init__(
        self,
        name: str,
        num_blocks: int,
        *,
        shares_of: Callable[[str], TierShares] = lambda tenant: TierShares(),
        retained_share: float = 1.0,
        ledger: TenantLedger | None = None,
    ) -> None:
        self.name = name
        self._ledger = ledger
        self._tier = tier_of(name)
        self.num_blocks = num_blocks
        self.retained_share = retained_share
        self.owned = NamespaceKeys()
        self.retained = NamespaceKeys()
        self.partless: set[bytes] = set()
        self._shares_of = shares_of
        self._listener = StoreListener()
        self._order = EvictionOrder()  # of tenants without a floor
        self._floored: dict[str, EvictionOrder] = {}
        # Of tenants with a ceiling. Their keys are also in `_order` or `_floored`.
        self._capped: dict[str, EvictionOrder] = {}
        # Priorities above the default by tenant, oldest first. A plain dictionary would find its first key slowly.
        self._retained: dict[str, OrderedDict[bytes, int]] = {}
        self._pending: set[bytes] = set()
        self._rewritten: set[bytes] = set()  # pending keys of which the store may hold an earlier object
        self._turns = itertools.count()
        self._early_turns = itertools.count(-1, -1)  # of blocks that earlier processes left

    def subscribe(self, listener: StoreListener) -> None:
        """Notify a listener of the blocks that the tier holds from now on."""
        self._listener = listener

    def __len__(self) -> int:
        return len(self.owned)

    def __contains__(self, key: bytes) -> bool:
        return key in self.owned

    def holds(self, key: bytes) -> bool:
        """Whether a block can be loaded."""
        return key in self.owned and key not in self._pending

    def is_pending(self, key: bytes) -> bool:
        """Whether a block is being stored."""
        return key in self._pending

    def may_have(self, key: bytes) -> bool:
        """Whether the store may hold an object of a block, perhaps without the block's part."""
        return self.holds(key) or key in self._rewritten

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys in eviction order, regardless of floors."""
        return (rank.key for rank in heapq.merge(self._order, *self._floored.values()))

    def page(self, start: int, tenant: str | None, max_listed: int) -> StoredPage:
        """List the namespaces that have blocks in the tier; see `NamespaceKeys.page`."""
        page = self.owned.page(start, tenant, max_listed)
        retained = (self.retained.num_of(each.namespace) for each in page.namespaces)
        namespaces = (
            each._replace(num_retained_blocks=num) for each, num in zip(page.namespaces, retained, strict=True)
        )
        return page._replace(namespaces=tuple(namespaces))

    def has_room_for(self, tenant: str, priority: int = DEFAULT_PRIORITY) -> bool:
        """Whether a block can be admitted, evicting another one if needed, but none of higher priority."""
        if len(self) < self.num_blocks and not self._is_at_ceiling(tenant):
            return True
        victim = self._victim(tenant)
        return victim is not None and victim.level <= priority

    def add(self, key: bytes, namespace: Namespace, priority: int = DEFAULT_PRIORITY) -> bytes | None:
        """Add a block that the device evicted. The tier must not hold it, and `has_room_for` must be true.

        Returns:
            The key of the block that is evicted for it: a block of the same tenant if the tenant has reached its
            ceiling. None if there is free space.
        """
        victim = None
        if len(self) >= self.num_blocks or self._is_at_ceiling(namespace.tenant):
            victim = self._victim(namespace.tenant)
        if victim is not None:
            if self._ledger is not None:
                owner = self.owned[victim.key].tenant
                self._ledger.evict(owner, self._tier, 1, by_self=owner == namespace.tenant)
            self.remove(victim.key)
        self.owned.add(key, namespace)
        if self._ledger is not None:
            self._ledger.resize(namespace.tenant, self._tier, 1)
        shares = self._shares_of(namespace.tenant)
        if shares.floor:
            self._floored.setdefault(namespace.tenant, EvictionOrder())
        if shares.ceiling is not None:
            self._capped.setdefault(namespace.tenant, EvictionOrder())
        self.note_evicted(key, priority)
        self._pending.add(key)
        return None if victim is None else victim.key

    def begin_rewrite(self, key: bytes) -> None:
        """Record that a block is being written again, now with its part."""
        self.partless.discard(key)
        self._pending.add(key)
        self._rewritten.add(key)

    def note_stored(self, key: bytes) -> None:
        """Record that the store holds a block."""
        self._pending.discard(key)
        self._rewritten.discard(key)
        if key in self:
            self._listener.stored(self.name, key)

    def add_found(self, blocks: Iterable[tuple[bytes, Namespace]]) -> list[bytes]:
        """Add blocks of an earlier process, most recently used first.

        They get the default priority, and are evicted before the present blocks with this priority.

        Returns:
            The keys that were not added, because the tier is full or their tenant has reached its ceiling.
        """
        left_out = []
        for key, namespace in blocks:
            if key in self:
                continue
            if len(self) >= self.num_blocks or self._is_at_ceiling(namespace.tenant):
                left_out.append(key)
                continue
            self.add(key, namespace)
            self.note_stored(key)
            turn = next(self._early_turns)
            for order in self._orders_of(namespace.tenant):
                order.put_first(key, DEFAULT_PRIORITY, turn)
        return left_out

    def note_evicted(self, key: bytes, priority: int = DEFAULT_PRIORITY) -> None:
        """Record that the device evicted a block that the tier holds, or that the priority of the block has changed.

        If the limit of retained blocks is reached, the tenant's oldest retained block falls back to the default
        priority. Prompts are evicted from their end, so their beginning stays retained. If the tenant has no retained
        block, or its oldest one has a higher priority than this block, this block gets the default priority.
        """
        self._forget_retained(key)
        if priority > DEFAULT_PRIORITY and not self._retain(key, priority):
            priority = DEFAULT_PRIORITY
        self._put_last(key, priority)

    def note_loaded(self, key: bytes) -> None:
        """Record that a block of the tier is also on the device."""
        self._forget_retained(key)
        self._put_last(key, _ON_DEVICE)

    def is_on_device(self, key: bytes) -> bool:
        """Whether a block of the tier is also on the device."""
        return self._level_of(key) == _ON_DEVICE

    def priority_of(self, key: bytes) -> int:
        """Return the priority of a block of the tier that is not on the device."""
        return self._level_of(key)

    def remove(self, key: bytes) -> None:
        """Remove a block if it is present."""
        if key not in self.owned:
            return
        tenant = self.owned[key].tenant
        self._forget_retained(key)
        for order in self._orders_of(tenant):
            order.remove(key)
        self._pending.discard(key)
        self._rewritten.discard(key)
        self.partless.discard(key)
        self.owned.remove(key)
        if self._ledger is not None:
            self._ledger.resize(tenant, self._tier, -1)
        if tenant not in self.owned.num_by_tenant:
            self._floored.pop(tenant, None)
            self._capped.pop(tenant, None)
        self._listener.removed(self.name, key)

    def remove_all(self, namespace: Namespace) -> list[bytes]:
        """Remove all blocks of a namespace. Returns their keys."""
        keys = self.owned.keys_of(namespace)
        for key in keys:
            self.remove(key)
        return keys

    def _victim(self, tenant: str) -> EvictionRank | None:
        """Return the block to evict for a block of a tenant. Complexity: O(tenants with a floor)."""
        if self._is_at_ceiling(tenant):
            return self._capped[tenant].first
        if not self._floored:
            return self._order.first
        orders = [self._order]
        orders += [order for owner, order in self._floored.items() if owner == tenant or self._is_above_floor(owner)]
        return min((first for order in orders if (first := order.first) is not None), default=None)

    def _is_above_floor(self, tenant: str) -> bool:
        return self.owned.num_by_tenant[tenant] > int(self._shares_of(tenant).floor * self.num_blocks)

    def _is_at_ceiling(self, tenant: str) -> bool:
        ceiling = self._shares_of(tenant).ceiling
        return ceiling is not None and self.owned.num_by_tenant[tenant] >= max(1, int(ceiling * self.num_blocks))

    def _level_of(self, key: bytes) -> int:
        return self._orders_of(self.owned[key].tenant)[0].level_of(key)

    def _retain(self, key: bytes, priority: int) -> bool:
        """Retain a key with a priority above the default. Returns whether the limits allow it."""
        tenant = self.owned[key].tenant
        priorities = self._retained.get(tenant, OrderedDict())
        max_retained = self._shares_of(tenant).retained * self.num_blocks
        if len(self.retained) >= self.retained_share * self.num_blocks or len(priorities) >= max_retained:
            oldest = next(iter(priorities), None)
            if oldest is None or priorities[oldest] > priority:
                return False
            self._forget_retained(oldest)
            self._put_last(oldest, DEFAULT_PRIORITY)
        self._retained.setdefault(tenant, OrderedDict())[key] = priority
        self.retained.add(key, self.owned[key])
        return True

    def _forget_retained(self, key: bytes) -> None:
        tenant = self.owned[key].tenant
        priorities = self._retained.get(tenant)
        if priorities is not None and priorities.pop(key, None) is not None:
            self.retained.remove(key)
            if not priorities:
                del self._retained[tenant]

    def _put_last(self, key: bytes, level: int) -> None:
        turn = next(self._turns)
        for order in self._orders_of(self.owned[key].tenant):
            order.put_last(key, level, turn)

    def _orders_of(self, tenant: str) -> tuple[EvictionOrder, ...]:
        main = self._floored.get(tenant, self._order)
        capped = self._capped.get(tenant)
        return (main,) if capped is None else (main, capped)


class SharedTierIndex(TierIndex):
    """The blocks that this server stored in a shared store or has found there.

    The store evicts blocks by itself, and other servers add blocks. So the store may hold blocks that are not in the
    index, and the index may contain blocks that the store has evicted.

    Args:
        name: name of the tier, such as `redis`.
        num_blocks: maximum number of keys in the index. If there are more, the first in eviction order, such as blocks
            that are also on the device, are removed from the index, but not from the store.
    """

    is_shared = True

    def add(self, key: bytes, namespace: Namespace, priority: int = DEFAULT_PRIORITY) -> bytes | None:
        """Add a block. Returns None, since the store evicts by itself."""
        super().add(key, namespace)
        return None

    def note_evicted(self, key: bytes, priority: int = DEFAULT_PRIORITY) -> None:
        """Record that the device evicted a block. Shared stores have no priorities."""
        super().note_evicted(key)
