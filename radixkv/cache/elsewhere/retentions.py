"""Priorities of blocks that are stored, or will be when they leave the device."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedSet

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.cache.elsewhere.owned_keys import OwnedKeys
from radixkv.namespace import Namespace

_MAX_KEYS = 1 << 18  # about 100 MB
_MAX_ENDED_AT_ONCE = 256


class Wish(NamedTuple):
    """Priority that a caller asked for.

    Attributes:
        priority: 0 to 100.
        expires_s: when it ends, by the cache's clock; None for never.
    """

    priority: int
    expires_s: float | None

    @property
    def rank(self) -> tuple[int, float]:
        """Its place among wishes for one block: a higher priority is worth more, and the same one for longer."""
        return self.priority, math.inf if self.expires_s is None else self.expires_s


class Retentions:
    """Remembers the priority of each block that has another one than the default.

    Args:
        max_keys: blocks to remember. Beyond them, of the tenant that has most the one is forgotten of which was heard
            longest ago, and has the default again. Of equals it is the one that adds another.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._wishes: dict[bytes, Wish] = {}
        self._by_tenant: dict[str, OrderedDict[bytes, None]] = {}  # the latest last
        self._of_size: dict[int, dict[str, None]] = {}  # tenants by the number of their keys
        self._most = 0  # keys of one tenant
        self._owned = OwnedKeys()
        self._ends: SortedSet[tuple[float, bytes]] = SortedSet()

    def __len__(self) -> int:
        return len(self._wishes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._wishes

    def wish_of(self, key: bytes) -> Wish | None:
        """Return the priority of a block and its end; None if it has the default."""
        return self._wishes.get(key)

    def of(self, key: bytes) -> int:
        """Return the priority of a block."""
        wish = self._wishes.get(key)
        return DEFAULT_PRIORITY if wish is None else wish.priority

    def set(self, key: bytes, namespace: Namespace, wish: Wish) -> bytes | None:
        """Give a block a priority. Returns the key that is forgotten for it, if one is.

        Complexity: O(log blocks with an end).
        """
        self.forget(key)
        if wish.priority == DEFAULT_PRIORITY:
            return None
        oldest = self._oldest(namespace.tenant) if len(self) == self._max_keys else None
        if oldest is not None:
            self.forget(oldest)
        self._wishes[key] = wish
        own = self._by_tenant.setdefault(namespace.tenant, OrderedDict())
        own[key] = None
        self._resize(namespace.tenant, len(own) - 1, len(own))
        self._owned.add(key, namespace)
        if wish.expires_s is not None:
            self._ends.add((wish.expires_s, key))
        return oldest

    def raise_to(self, key: bytes, namespace: Namespace, wish: Wish) -> bytes | None:
        """Give a block a priority, unless it has a higher one, or the same one for longer. Returns as `set` does."""
        known = self._wishes.get(key, wish)
        return self.set(key, namespace, max(known, wish, key=lambda each: each.rank))

    def forget(self, key: bytes) -> None:
        """Give a block the default priority."""
        wish = self._wishes.pop(key, None)
        if wish is None:
            return
        tenant = self._owned[key].tenant
        own = self._by_tenant[tenant]
        del own[key]
        self._resize(tenant, len(own) + 1, len(own))
        if not own:
            del self._by_tenant[tenant]
        self._owned.remove(key)
        if wish.expires_s is not None:
            self._ends.remove((wish.expires_s, key))

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Forget the blocks of all namespaces with these names, None for any."""
        for namespace in [each for each in self._owned if each.is_among(tenant, adapter, salt)]:
            for key in self._owned.keys_of(namespace):
                self.forget(key)

    def expire(self, now_s: float) -> list[bytes]:
        """End priorities whose time has come, 256 at most. Returns their keys."""
        ended = [key for _, key in islice(self._ends.irange(maximum=(now_s, b"\xff" * 64)), _MAX_ENDED_AT_ONCE)]
        for key in ended:
            self.forget(key)
        return ended

    def _oldest(self, tenant: str) -> bytes:
        """Return the key that is forgotten for one of a tenant."""
        largest = self._of_size[self._most]
        loser = tenant if tenant in largest else next(iter(largest))
        return next(iter(self._by_tenant[loser]))

    def _resize(self, tenant: str, before: int, after: int) -> None:
        """Note that a tenant has one key more, or one less."""
        if after:
            self._of_size.setdefault(after, {})[tenant] = None
        if before:
            del self._of_size[before][tenant]
            if not self._of_size[before]:
                del self._of_size[before]
        if after > self._most or self._most not in self._of_size:
            self._most = after
