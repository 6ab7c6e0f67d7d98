"""Keys of blocks by the namespace that owns them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedDict

from radixkv.api.segments import StoredNamespace, StoredPage
from radixkv.namespace import Namespace

# Limits of one call of `page`, so that it takes under 1 ms of the engine's thread: examined and listed namespaces.
MAX_PASSED = 1024
MAX_LISTED = 256


class NamespaceKeys:
    """Keys of blocks by namespace. Namespaces are in the order in which they were added; one without keys is removed.

    Attributes:
        num_by_tenant: number of keys of each tenant that has any.
    """

    def __init__(self) -> None:
        self.num_by_tenant: Counter[str] = Counter()
        self._owners: dict[bytes, Namespace] = {}
        self._keys: dict[Namespace, set[bytes]] = {}
        self._numbers: dict[Namespace, int] = {}  # numbers in the order in which the namespaces were added
        self._by_number: SortedDict[int, Namespace] = SortedDict()
        self._next_number = itertools.count()

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, key: bytes) -> bool:
        return key in self._owners

    def __getitem__(self, key: bytes) -> Namespace:
        return self._owners[key]

    def __iter__(self) -> Iterator[Namespace]:
        """Iterate over the namespaces."""
        return iter(self._keys)

    @property
    def num_namespaces(self) -> int:
        """Number of namespaces that have keys."""
        return len(self._keys)

    def add(self, key: bytes, namespace: Namespace) -> None:
        """Add a key, which must not be present."""
        self._owners[key] = namespace
        if namespace not in self._keys:
            self._keys[namespace] = set()
            self._numbers[namespace] = next(self._next_number)
            self._by_number[self._numbers[namespace]] = namespace
        self._keys[namespace].add(key)
        self.num_by_tenant[namespace.tenant] += 1

    def remove(self, key: bytes) -> None:
        """Remove a key, which must be present."""
        namespace = self._owners.pop(key)
        self._keys[namespace].discard(key)
        if not self._keys[namespace]:
            del self._keys[namespace]
            del self._by_number[self._numbers.pop(namespace)]
        self.num_by_tenant[namespace.tenant] -= 1
        if not self.num_by_tenant[namespace.tenant]:
            del self.num_by_tenant[namespace.tenant]

    def keys_of(self, namespace: Namespace) -> list[bytes]:
        """List the keys of a namespace."""
        return list(self._keys.get(namespace, ()))

    def num_of(self, namespace: Namespace) -> int:
        """Count the keys of a namespace."""
        return len(self._keys.get(namespace, ()))

    def page(self, start: int, tenant: str | None, max_listed: int) -> StoredPage:
        """List namespaces in the order of their numbers, from `start` on.

        A page may be empty although further pages follow.

        A namespace that has blocks during a whole listing is on exactly one page.

        Complexity: O(`MAX_PASSED`).
        """
        listed: list[StoredNamespace] = []
        next_start = None
        for num_passed, number in enumerate(islice(self._by_number.irange(start), MAX_PASSED + 1)):
            if num_passed == MAX_PASSED or len(listed) == min(max_listed, MAX_LISTED):
                next_start = number
                break
            namespace = self._by_number[number]
            if tenant is None or namespace.tenant == tenant:
                listed.append(StoredNamespace(namespace, len(self._keys[namespace])))
        # `num_compared` does not count all examined namespaces, since that would reveal other tenants.
        return StoredPage(tuple(listed), next_start, len(listed), len(self._keys))
