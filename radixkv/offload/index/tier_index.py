"""The index of one tier: which blocks it holds, and in which order it evicts them."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.api.segments import StoredPage
from radixkv.namespace import Namespace
from radixkv.offload.index.namespace_keys import NamespaceKeys
from radixkv.offload.index.prompt_blocks import KeyedBlock


class StoreListener:
    """Is told which blocks stores have. Each method does nothing; override those that matter.

    Attributes:
        is_on: whether it wants to be told; if so, what became of a save is looked at soon, also while nothing runs.
    """

    is_on = False

    def met(self, namespace: Namespace, tokens: bytes, start: int, blocks: Sequence[KeyedBlock]) -> None:
        """Consecutive blocks of a prompt are stored, or may be soon; only here it is told which tokens a key means.

        Args:
            namespace: of the prompt, without a trunk.
            tokens: the prompt as the cache knows it, up to the end of these blocks at least.
            start: the place of the first of them among the prompt's blocks.
            blocks: with their keys.
        """

    def stored(self, store: str, key: bytes) -> None:
        """A store has a block. It may be told again."""

    def removed(self, store: str, key: bytes) -> None:
        """A store does not have a block any more, or never got it; or, of a shared one, nobody knows."""


class EvictionRank(NamedTuple):
    """EvictionRank of a key among all keys of a store. The lowest goes first.

    Attributes:
        level: keys of a lower level go before those of a higher one.
        turn: within a level the lowest goes first. No two keys have the same.
        key: of the block.
    """

    level: int
    turn: int
    key: bytes


class EvictionOrder:
    """Keys by level and turn.

        level -1  [ a  b ]      level 50  [ c  d  e ]      level 90  [ f ]
                    goes first                                        goes last

    All methods are O(levels) at most.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[bytes, int]] = {}
        self._level_of: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[EvictionRank]:
        """Iterate from the key that goes first."""
        for level in sorted(self._levels):
            for key, turn in self._levels[level].items():
                yield EvictionRank(level, turn, key)

    @property
    def first(self) -> EvictionRank | None:
        """The key that goes first, if there is any."""
        if not self._levels:
            return None
        level = min(self._levels)
        key, turn = next(iter(self._levels[level].items()))
        return EvictionRank(level, turn, key)

    def level_of(self, key: bytes) -> int:
        """Return the level of a key that is there."""
        return self._level_of[key]

    def put_last(self, key: bytes, level: int, turn: int) -> None:
        """Put a key behind all others of a level. `turn` is higher than theirs."""
        self.remove(key)
        self._levels.setdefault(level, OrderedDict())[key] = turn
        self._level_of[key] = level

    def put_first(self, key: bytes, level: int, turn: int) -> None:
        """Put a key before all others of a level. `turn` is lower than theirs."""
        self.put_last(key, level, turn)
        self._levels[level].move_to_end(key, last=False)

    def remove(self, key: bytes) -> None:
        """Take a key out, if it is there."""
        level = self._level_of.pop(key, None)
        if level is None:
            return
        del self._levels[level][key]
        if not self._levels[level]:
            del self._levels[level]


_ON_DEVICE = -1  # below every priority


class TierShares(NamedTuple):
    """TierShares of a store's room that one tenant may rely on, or is held to, each 0 to 1.

    Attributes:
        floor: no other tenant's blocks push out what it has of these.
        ceiling: it gets no more; None for all of it.
        retained: no more of its blocks have a priority above the default.
    """

    floor: float = 0.0
    ceiling: float | None = None
    retained: float = 1.0


class TierIndex:
    """Knows which blocks a store holds, without asking it.

        goes first   [ on the device as well )[ priority 0 )  ...  [ priority 50 )  ...  [ priority 100 )   goes last
                       loaded longest ago first                      left longest ago first

    A block is expected from `add` until `note_stored`, and is not to be asked for.

    A block that is on the device as well is of no use here until it leaves the device. If it is still here by then,
    nothing has to be written.

    Args:
        name: of the store, such as `host`.
        num_blocks: blocks that it has room for.

    Attributes:
        name, num_blocks: see above.
        owned: whose blocks are here.
        retained: whose blocks here have a priority above the default. On the device as well they have none here.
        shares_of: returns the shares of a tenant. Always the same for a tenant.
        retained_share: share of the room that may have a priority above the default.
        is_shared: whether other servers use the store as well; see `SharedTierIndex`.
        partless: keys of blocks here that are known to lack their parts; see `radixkv/cache/parts`.
        listener: is told which blocks are here.
    """

    is_shared = False

    def __init__(
        self,
        name: str,
        num_blocks: int,
        *,
        shares_of: Callable[[str], TierShares] = lambda tenant: TierShares(),
        retained_share: float = 1.0,
    ) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.retained_share = retained_share
        self.owned = NamespaceKeys()
        self.retained = NamespaceKeys()
        self.partless: set[bytes] = set()
        self._shares_of = shares_of
        self._listener = StoreListener()
        self._order = EvictionOrder()  # of tenants without a floor
        self._floored: dict[str, EvictionOrder] = {}
        self._capped: dict[str, EvictionOrder] = {}  # of tenants with a ceiling; they are in one of the others as well
        self._retained: dict[str, dict[bytes, int]] = {}  # priorities above the default by tenant, the oldest first
        self._expected: set[bytes] = set()
        self._rewritten: set[bytes] = set()  # those expected ones of which an earlier object may be there
        self._turns = itertools.count()
        self._early_turns = itertools.count(-1, -1)

    def subscribe(self, listener: StoreListener) -> None:
        """Notify a listener of the blocks that the tier holds from now on."""
        self._listener = listener

    def __len__(self) -> int:
        return len(self.owned)

    def __contains__(self, key: bytes) -> bool:
        return key in self.owned

    def holds(self, key: bytes) -> bool:
        """Whether a block can be loaded."""
        return key in self.owned and key not in self._expected

    def may_have(self, key: bytes) -> bool:
        """Whether there is something of a block that is here, perhaps without the part that is on its way."""
        return self.holds(key) or key in self._rewritten

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys of its blocks, from the one that goes first if no floor protects it."""
        return (place.key for place in heapq.merge(self._order, *self._floored.values()))

    def page(self, start: int, tenant: str | None, max_listed: int) -> StoredPage:
        """List the namespaces of which it holds blocks; see `NamespaceKeys.page`."""
        page = self.owned.page(start, tenant, max_listed)
        retained = (self.retained.num_of(each.namespace) for each in page.namespaces)
        told = (each._replace(num_retained_blocks=num) for each, num in zip(page.namespaces, retained, strict=True))
        return page._replace(namespaces=tuple(told))

    def has_room_for(self, tenant: str, priority: int = DEFAULT_PRIORITY) -> bool:
        """Whether a block may come: there is room, or one may go for it.

        No block goes for one of lower priority.
        """
        if len(self) < self.num_blocks and not self._has_its_share(tenant):
            return True
        victim = self._victim(tenant)
        return victim is not None and victim.level <= priority

    def add(self, key: bytes, namespace: Namespace, priority: int = DEFAULT_PRIORITY) -> bytes | None:
        """Take a block that left the device and is not here, if `has_room_for` it.

        Returns:
            The key of the block that goes for it, one of the same tenant if that has all it may; None if there is room.
        """
        victim = None
        if len(self) >= self.num_blocks or self._has_its_share(namespace.tenant):
            victim = self._victim(namespace.tenant)
        if victim is not None:
            self.remove(victim.key)
        self.owned.add(key, namespace)
        shares = self._shares_of(namespace.tenant)
        if shares.floor:
            self._floored.setdefault(namespace.tenant, EvictionOrder())
        if shares.ceiling is not None:
            self._capped.setdefault(namespace.tenant, EvictionOrder())
        self.note_left(key, priority)
        self._expected.add(key)
        return None if victim is None else victim.key

    def expect(self, key: bytes) -> None:
        """Note that a block that is here is written once more, with its part."""
        self.partless.discard(key)
        self._expected.add(key)
        self._rewritten.add(key)

    def note_stored(self, key: bytes) -> None:
        """Note that the store has a block."""
        self._expected.discard(key)
        self._rewritten.discard(key)
        if key in self:
            self._listener.stored(self.name, key)

    def add_found(self, blocks: Iterable[tuple[bytes, Namespace]]) -> list[bytes]:
        """Take blocks that an earlier process left, the one that goes last at first. They go before those here.

        Returns:
            The keys for which there is no room, or which would be more than the share of their tenant.
        """
        left_out = []
        for key, namespace in blocks:
            if key in self:
                continue
            if len(self) >= self.num_blocks or self._has_its_share(namespace.tenant):
                left_out.append(key)
                continue
            self.add(key, namespace)
            self.note_stored(key)
            turn = next(self._early_turns)
            for order in self._orders_of(namespace.tenant):
                order.put_first(key, DEFAULT_PRIORITY, turn)
        return left_out

    def note_left(self, key: bytes, priority: int = DEFAULT_PRIORITY) -> None:
        """Note that a block that is here left the device, or has another priority now.

        If no more blocks may have a priority above the default, its tenant's oldest one has the default from now on: of
        a prompt that leaves, its end first, the beginning is kept. If the tenant has none, this one has the default.
        """
        self._forget_retained(key)
        if priority > DEFAULT_PRIORITY and not self._retain(key, priority):
            priority = DEFAULT_PRIORITY
        self._put_last(key, priority)

    def note_loaded(self, key: bytes) -> None:
        """Note that a block that is here is on the device as well."""
        self._forget_retained(key)
        self._put_last(key, _ON_DEVICE)

    def is_on_device(self, key: bytes) -> bool:
        """Whether a block that is here is on the device as well."""
        return self._level_of(key) == _ON_DEVICE

    def priority_of(self, key: bytes) -> int:
        """Return the priority of a block that is here and not on the device."""
        return self._level_of(key)

    def remove(self, key: bytes) -> None:
        """Forget a block, if it is here."""
        if key not in self.owned:
            return
        tenant = self.owned[key].tenant
        self._forget_retained(key)
        for order in self._orders_of(tenant):
            order.remove(key)
        self._expected.discard(key)
        self._rewritten.discard(key)
        self.partless.discard(key)
        self.owned.remove(key)
        if tenant not in self.owned.num_by_tenant:
            self._floored.pop(tenant, None)
            self._capped.pop(tenant, None)
        self._listener.removed(self.name, key)

    def remove_all(self, namespace: Namespace) -> list[bytes]:
        """Forget all blocks of a namespace. Returns their keys."""
        keys = self.owned.keys_of(namespace)
        for key in keys:
            self.remove(key)
        return keys

    def _victim(self, tenant: str) -> EvictionRank | None:
        """Return what goes for a block of a tenant. Complexity: O(tenants with a floor)."""
        if self._has_its_share(tenant):
            return self._capped[tenant].first
        if not self._floored:
            return self._order.first
        orders = [self._order]
        orders += [own for other, own in self._floored.items() if other == tenant or self._is_above_floor(other)]
        return min((first for order in orders if (first := order.first) is not None), default=None)

    def _is_above_floor(self, tenant: str) -> bool:
        return self.owned.num_by_tenant[tenant] > int(self._shares_of(tenant).floor * self.num_blocks)

    def _has_its_share(self, tenant: str) -> bool:
        ceiling = self._shares_of(tenant).ceiling
        return ceiling is not None and self.owned.num_by_tenant[tenant] >= max(1, int(ceiling * self.num_blocks))

    def _level_of(self, key: bytes) -> int:
        return self._orders_of(self.owned[key].tenant)[0].level_of(key)

    def _retain(self, key: bytes, priority: int) -> bool:
        """Count a key with a priority above the default. Returns whether it may have it."""
        tenant = self.owned[key].tenant
        own = self._retained.get(tenant, {})
        most = self._shares_of(tenant).retained * self.num_blocks
        if len(self.retained) >= self.retained_share * self.num_blocks or len(own) >= most:
            oldest = next(iter(own), None)
            if oldest is None or own[oldest] > priority:
                return False
            self._forget_retained(oldest)
            self._put_last(oldest, DEFAULT_PRIORITY)
        self._retained.setdefault(tenant, {})[key] = priority
        self.retained.add(key, self.owned[key])
        return True

    def _forget_retained(self, key: bytes) -> None:
        tenant = self.owned[key].tenant
        own = self._retained.get(tenant, {})
        if own.pop(key, None) is not None:
            self.retained.remove(key)
            if not own:
                del self._retained[tenant]

    def _put_last(self, key: bytes, level: int) -> None:
        turn = next(self._turns)
        for order in self._orders_of(self.owned[key].tenant):
            order.put_last(key, level, turn)

    def _orders_of(self, tenant: str) -> tuple[EvictionOrder, ...]:
        main, capped = self._floored.get(tenant, self._order), self._capped.get(tenant)
        return (main,) if capped is None else (main, capped)


_MOST_KNOWN_BLOCKS = 1 << 18  # about 80 MB


class SharedTierIndex(TierIndex):
    """Knows some of the blocks that a shared store holds: those that this server stored, or has found there.

    The store gives up blocks by itself, and gets others from other servers. What is not known is to be asked for; what
    is known may be gone.

    Args:
        name: of the store, such as `redis`.
        num_blocks: blocks to know at most. Those that were used longest ago are forgotten, here and not in the store.
    """

    is_shared = True

    def __init__(self, name: str, num_blocks: int = _MOST_KNOWN_BLOCKS) -> None:
        super().__init__(name, num_blocks)

    def add(self, key: bytes, namespace: Namespace, priority: int = DEFAULT_PRIORITY) -> bytes | None:
        """Take a block that is not known here. Returns None: the store makes room by itself."""
        super().add(key, namespace)
        return None

    def note_left(self, key: bytes, priority: int = DEFAULT_PRIORITY) -> None:
        """Note that a block left the device. The store knows no priorities."""
        super().note_left(key)
