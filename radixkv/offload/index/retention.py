"""Retention of blocks in the tiers: the priorities that callers requested, and when they expire."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from sortedcontainers import SortedSet

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.namespace import Namespace
from radixkv.offload.index.namespace_keys import NamespaceKeys
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.index.tier_index import TierIndex

_MAX_KEYS = 1 << 18  # about 100 MB
_MAX_EXPIRED_AT_ONCE = 256


class RetentionHint(NamedTuple):
    """A retention priority that a caller requested.

    Attributes:
        priority: 0 to 100.
        expires_s: time at which it expires, by the cache's clock; None for never.
    """

    priority: int
    expires_s: float | None

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key of hints for one block: the priority, and then the expiry."""
        return self.priority, math.inf if self.expires_s is None else self.expires_s


class RetentionHints:
    """The priority of each block that does not have the default priority.

    Args:
        max_keys: maximum number of blocks. If there are more, the oldest block of the tenant with the most blocks gets
            the default priority again. If several tenants have the most, this is the tenant that adds a block, if it is
            one of them.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._hints: dict[bytes, RetentionHint] = {}
        self._by_tenant: dict[str, OrderedDict[bytes, None]] = {}  # the latest last
        self._tenants_by_size: dict[int, dict[str, None]] = {}  # by the number of their keys
        self._max_tenant_keys = 0  # keys of the tenant with the most
        self._owned = NamespaceKeys()
        self._expiries: SortedSet[tuple[float, bytes]] = SortedSet()

    def __len__(self) -> int:
        return len(self._hints)

    def __contains__(self, key: bytes) -> bool:
        return key in self._hints

    def hint_of(self, key: bytes) -> RetentionHint | None:
        """Return the priority of a block and its expiry; None for the default priority."""
        return self._hints.get(key)

    def of(self, key: bytes) -> int:
        """Return the priority of a block."""
        hint = self._hints.get(key)
        return DEFAULT_PRIORITY if hint is None else hint.priority

    def set(self, key: bytes, namespace: Namespace, hint: RetentionHint) -> bytes | None:
        """Set the priority of a block. Returns the key of a block that was reset to the default to make room, if any.

        Complexity: O(log blocks with an expiry).
        """
        self.forget(key)
        if hint.priority == DEFAULT_PRIORITY:
            return None
        reset_key = self._key_to_reset(namespace.tenant) if len(self) == self._max_keys else None
        if reset_key is not None:
            self.forget(reset_key)
        self._hints[key] = hint
        own = self._by_tenant.setdefault(namespace.tenant, OrderedDict())
        own[key] = None
        self._resize(namespace.tenant, len(own) - 1, len(own))
        self._owned.add(key, namespace)
        if hint.expires_s is not None:
            self._expiries.add((hint.expires_s, key))
        return reset_key

    def raise_to(self, key: bytes, namespace: Namespace, hint: RetentionHint) -> bytes | None:
        """Set the priority of a block, unless it already has a hint of a higher rank. Returns the same as `set`."""
        present = self._hints.get(key, hint)
        return self.set(key, namespace, max(present, hint, key=lambda each: each.rank))

    def forget(self, key: bytes) -> None:
        """Reset a block to the default priority."""
        hint = self._hints.pop(key, None)
        if hint is None:
            return
        tenant = self._owned[key].tenant
        own = self._by_tenant[tenant]
        del own[key]
        self._resize(tenant, len(own) + 1, len(own))
        if not own:
            del self._by_tenant[tenant]
        self._owned.remove(key)
        if hint.expires_s is not None:
            self._expiries.remove((hint.expires_s, key))

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Reset the blocks of all namespaces with these names, None for any."""
        for namespace in [each for each in self._owned if each.is_among(tenant, adapter, salt)]:
            for key in self._owned.keys_of(namespace):
                self.forget(key)

    def expire(self, now_s: float) -> list[bytes]:
        """Reset blocks whose priority has expired, at most 256. Returns their keys."""
        last = (now_s, b"\xff" * 64)  # not before any key that expires now
        expired = [key for _, key in islice(self._expiries.irange(maximum=last), _MAX_EXPIRED_AT_ONCE)]
        for key in expired:
            self.forget(key)
        return expired

    def _key_to_reset(self, tenant: str) -> bytes:
        """Return the key that is reset when a tenant adds one at the limit."""
        largest_tenants = self._tenants_by_size[self._max_tenant_keys]
        owner = tenant if tenant in largest_tenants else next(iter(largest_tenants))
        return next(iter(self._by_tenant[owner]))

    def _resize(self, tenant: str, before: int, after: int) -> None:
        """Record that the number of a tenant's keys has changed by one."""
        if after:
            self._tenants_by_size.setdefault(after, {})[tenant] = None
        if before:
            del self._tenants_by_size[before][tenant]
            if not self._tenants_by_size[before]:
                del self._tenants_by_size[before]
        if after > self._max_tenant_keys or self._max_tenant_keys not in self._tenants_by_size:
            self._max_tenant_keys = after


class StoredRetention:
    """Applies retention priorities to stored blocks, and resets them when they expire.

    A block is of no use without the blocks before it, so a raised priority also applies to these.

    Args:
        tier_indexes: the tiers by name. Shared ones have no priorities.
    """

    def __init__(self, tier_indexes: Mapping[str, TierIndex]) -> None:
        self._tier_indexes = [tier_index for tier_index in tier_indexes.values() if not tier_index.is_shared]
        self._hints = RetentionHints()

    def priority_of(self, key: bytes) -> int:
        """Return the priority of a block."""
        return self._hints.of(key)

    def note_evicted(
        self, blocks: Sequence[KeyedBlock], hint: RetentionHint, first: int, path: Iterator[KeyedBlock]
    ) -> None:
        """Keep the priority that blocks have when the device evicts them, unless they have a hint of a higher rank.

        If the block before them already has this hint, so have all blocks before that one.

        Args:
            blocks: consecutive blocks of a prompt.
            hint: the priority.
            first: index of the first of them in the prompt.
            path: yields the blocks of the prompt; not read if the priority is below the default, or if the block before
                `blocks` already has the same hint, including the expiry, or a higher priority.
        """
        before = self._hints.hint_of(blocks[0].parent) if blocks else None
        path_has_hint = before is not None and (before == hint or before.priority > hint.priority)
        if path_has_hint or hint.priority < DEFAULT_PRIORITY:
            self.note(blocks, 0, hint)
        else:
            self.note(list(islice(path, first + len(blocks))), first, hint)

    def note(self, path: Sequence[KeyedBlock], start: int, hint: RetentionHint) -> None:
        """Set the priority of evicted blocks from `start` on that have no hint of a higher rank.

        A priority above the default also applies to the blocks before them.

        Args:
            path: the first blocks of a prompt.
            start: index in `path`.
            hint: the priority.
        """
        self._apply(path, start, hint, self._hints.raise_to)

    def set(self, path: Sequence[KeyedBlock], start: int, hint: RetentionHint) -> None:
        """Set the priority of the stored blocks from `start` on; see `note`.

        Blocks that are not stored get no priority here: while they are on the device, the cache keeps their priority.
        """
        for block in path[start:]:
            self._hints.forget(block.key)
        num_before = sum(self._is_stored(block) for block in path[:start])
        self._apply(list(filter(self._is_stored, path)), num_before, hint, self._hints.set)

    def hints(self, tier_index: TierIndex) -> list[tuple[bytes, RetentionHint]]:
        """List the blocks of a tier whose priority is not the default, in eviction order."""
        found = ((key, self._hints.hint_of(key)) for key in tier_index)
        return [(key, hint) for key, hint in found if hint is not None]

    def restore(self, tier_index: TierIndex, hints: Sequence[tuple[bytes, RetentionHint]]) -> None:
        """Set the priorities of stored blocks that `hints` listed in an earlier process.

        Blocks that already have a priority in this process keep it.
        """
        for key, hint in hints:
            if key in tier_index and key not in self._hints:
                reset_key = self._hints.set(key, tier_index.owned[key], hint)
                self._reorder(reset_key)
                self._reorder(key)

    def granted(self, blocks: Sequence[KeyedBlock], priority: int) -> tuple[int, int]:
        """Count the first blocks that are stored with this priority, and the first ones that are stored at all."""
        stored = list(takewhile(self._is_stored, blocks))
        granted = takewhile(lambda block: self._has(block.key, priority), stored)
        return sum(1 for _ in granted), len(stored)

    def expire(self, now_s: float) -> None:
        """Reset expired priorities, at most 256."""
        for key in self._hints.expire(now_s):
            self._reorder(key)

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Reset the blocks of all namespaces with these names, None for any."""
        self._hints.purge(tenant, adapter, salt)

    def _apply(
        self,
        path: Sequence[KeyedBlock],
        start: int,
        hint: RetentionHint,
        set_hint: Callable[[bytes, Namespace, RetentionHint], bytes | None],
    ) -> None:
        """Set the priority of the blocks from `start` on with `set_hint`, and raise that of the others if necessary."""
        for index, block in reversed(list(enumerate(path))):  # the beginning last, so that it is kept if not all can be
            reset_key = None  # another block, which gets the default priority to make room
            if index >= start:
                reset_key = set_hint(block.key, block.namespace, hint)
            elif hint.priority > DEFAULT_PRIORITY:
                reset_key = self._hints.raise_to(block.key, block.namespace, hint)
            self._reorder(reset_key)
            self._reorder(block.key)

    def _reorder(self, key: bytes | None) -> None:
        """Move a block in the eviction orders if its priority has changed. None is ignored."""
        if key is None:
            return
        priority = self._hints.of(key)
        for tier_index in self._tier_indexes:
            if key in tier_index and not tier_index.is_on_device(key) and tier_index.priority_of(key) != priority:
                tier_index.note_evicted(key, priority)

    def _is_stored(self, block: KeyedBlock) -> bool:
        return any(block.key in tier_index for tier_index in self._tier_indexes)

    def _has(self, key: bytes, priority: int) -> bool:
        return any(key in tier_index and tier_index.priority_of(key) == priority for tier_index in self._tier_indexes)
