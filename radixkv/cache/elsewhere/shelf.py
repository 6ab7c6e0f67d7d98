"""The books of one store: which blocks it holds, and which of them go first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

from radixkv.namespace import Namespace


class Shelf:
    """Knows which blocks a store holds, without asking it.

        goes first   [ on the device as well )[ not there ............. )   goes last
                       loaded longest ago first  left it longest ago first

    A block is expected from `add` until `note_stored`, and is not to be asked for.

    A block that is on the device as well is of no use here until it leaves the device. If it is still here by then,
    nothing has to be written.

    Args:
        name: of the store, such as `host`.
        num_blocks: blocks that it has room for.

    Attributes:
        name, num_blocks: see above.
        share_of: returns the part of the room that a tenant may have; None for all of it. Always the same for a tenant.
        num_by_tenant: blocks of each tenant that has some.
        is_shared: whether other servers use the store as well; see `SharedShelf`.
    """

    is_shared = False

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.share_of: Callable[[str], float | None] = lambda tenant: None
        self.num_by_tenant: Counter[str] = Counter()
        self._owners: dict[bytes, Namespace] = {}  # of each block
        self._by_owner: dict[Namespace, set[bytes]] = {}
        self._order = _Order()
        self._by_tenant: dict[str, _Order] = {}  # of tenants that may not have all of it
        self._expected: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, key: bytes) -> bool:
        return key in self._owners

    def holds(self, key: bytes) -> bool:
        """Whether a block can be loaded."""
        return key in self._owners and key not in self._expected

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys of its blocks, from the one that goes first."""
        return iter(self._order)

    @property
    def namespaces(self) -> list[Namespace]:
        """Namespaces of which it holds blocks."""
        return list(self._by_owner)

    def add(self, key: bytes, namespace: Namespace) -> bytes | None:
        """Take a block that left the device and is not here.

        Returns:
            The key of the block that goes for it, one of the same tenant if that has all it may; None if there is room.
        """
        victim = None
        if self._has_its_share(namespace.tenant):
            victim = next(iter(self._by_tenant[namespace.tenant]))
        elif len(self) >= self.num_blocks:
            victim = next(iter(self))
        if victim is not None:
            self.remove(victim)
        self._owners[key] = namespace
        self._by_owner.setdefault(namespace, set()).add(key)
        self.num_by_tenant[namespace.tenant] += 1
        if self.share_of(namespace.tenant) is not None:
            self._by_tenant.setdefault(namespace.tenant, _Order())
        for order in self._orders_of(namespace):
            order.note_left(key)
        self._expected.add(key)
        return victim

    def note_stored(self, key: bytes) -> None:
        """Note that the store has a block."""
        self._expected.discard(key)

    def add_found(self, blocks: Sequence[tuple[bytes, Namespace]]) -> None:
        """Take blocks that an earlier process left, the one that goes first at first. They go before those here."""
        for key, namespace in reversed(blocks):
            has_room = len(self) < self.num_blocks and not self._has_its_share(namespace.tenant)
            if key not in self and has_room:
                self.add(key, namespace)
                self.note_stored(key)
                for order in self._orders_of(namespace):
                    order.put_first(key)

    def note_left(self, key: bytes) -> None:
        """Note that a block that is here left the device."""
        for order in self._orders_of(self._owners[key]):
            order.note_left(key)

    def note_loaded(self, key: bytes) -> None:
        """Note that a block that is here is on the device as well."""
        for order in self._orders_of(self._owners[key]):
            order.note_loaded(key)

    def remove(self, key: bytes) -> None:
        """Forget a block, if it is here."""
        namespace = self._owners.pop(key, None)
        if namespace is None:
            return
        for order in self._orders_of(namespace):
            order.remove(key)
        self._expected.discard(key)
        keys = self._by_owner[namespace]
        keys.discard(key)
        if not keys:
            del self._by_owner[namespace]
        self.num_by_tenant[namespace.tenant] -= 1
        if not self.num_by_tenant[namespace.tenant]:
            del self.num_by_tenant[namespace.tenant]
            self._by_tenant.pop(namespace.tenant, None)

    def remove_all(self, namespace: Namespace) -> list[bytes]:
        """Forget all blocks of a namespace. Returns their keys."""
        keys = list(self._by_owner.get(namespace, ()))
        for key in keys:
            self.remove(key)
        return keys

    def _has_its_share(self, tenant: str) -> bool:
        share = self.share_of(tenant)
        return share is not None and self.num_by_tenant[tenant] >= max(1, int(share * self.num_blocks))

    def _orders_of(self, namespace: Namespace) -> tuple[_Order, ...]:
        own = self._by_tenant.get(namespace.tenant)
        return (self._order,) if own is None else (self._order, own)


class _Order:
    """Keys in the order in which they go."""

    def __init__(self) -> None:
        self._on_device: OrderedDict[bytes, None] = OrderedDict()
        self._left_device: OrderedDict[bytes, None] = OrderedDict()

    def __iter__(self) -> Iterator[bytes]:
        yield from self._on_device
        yield from self._left_device

    def note_left(self, key: bytes) -> None:
        self._on_device.pop(key, None)
        self._left_device[key] = None
        self._left_device.move_to_end(key)

    def note_loaded(self, key: bytes) -> None:
        self._left_device.pop(key, None)
        self._on_device[key] = None
        self._on_device.move_to_end(key)

    def put_first(self, key: bytes) -> None:
        self._left_device.move_to_end(key, last=False)

    def remove(self, key: bytes) -> None:
        self._on_device.pop(key, None)
        self._left_device.pop(key, None)
