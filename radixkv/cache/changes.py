"""Changes to the trees of a cache, and their listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from radixkv.api.miss_reason import MissReason
from radixkv.cache.node import Node


class Listener:
    """Notified of every change to the trees of a cache. The methods do nothing; override those of interest.

    A listener must not change trees or the pool. All times are in seconds of the cache's clock.
    """

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        """A lease, or a call of `touch`, found the first `num_bytes` of the path to the end of `node`.

        Called before `last_used_s` of the path changes. If `num_bytes` ends inside `node`, that node does not
        count as used: if the rest of the prompt is published, `node` is split, and `split` reports the use.
        """

    def inserted(self, leaf: Node, now_s: float) -> None:
        """A new leaf was published.

        `now_s` is the time of this use. If blocks are loaded ahead of a request, nothing has used them, and it is the
        time of their last use.
        """

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """A leaf has more tokens than before, in `num_new_blocks` more blocks; 0 if its last block had room.

        `now_s` as in `inserted`.
        """

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """A node was split because a prompt shares only its upper half, which counts as a use of the upper half.

        `last_used_s` is the time of the previous use. `lower` is the object that existed before the split.
        """

    def cut(self, lower: Node) -> None:
        """A node was split by the cache itself, not by a use. Both halves have its `policy_note`."""

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """A path of nodes without branches was joined into one node, `lower`. The other nodes no longer exist.

        Called after `lower` has the tokens and blocks of all. `uppers` are ordered from the top and still have
        their own.
        """

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """The last `num_blocks` blocks of a leaf, perhaps all of them, are about to be evicted.

        `fingerprint` is the fingerprint of the first of these blocks, and `reason` is the reason of a later miss there.
        """

    def purged(self, node: Node) -> None:
        """A node is about to be removed by a purge, alone or with its whole tree."""


class Changes(Listener):
    """Notifies listeners of each change, in the order of `listeners`.

    Args:
        listeners: a listener is called only for the methods that its class overrides.
    """

    def __init__(self, listeners: Iterable[Listener]) -> None:
        listeners = tuple(listeners)
        self._used = _overridden(listeners, "used")
        self._inserted = _overridden(listeners, "inserted")
        self._grown = _overridden(listeners, "grown")
        self._split = _overridden(listeners, "split")
        self._cut = _overridden(listeners, "cut")
        self._joined = _overridden(listeners, "joined")
        self._evicted = _overridden(listeners, "evicted")
        self._purged = _overridden(listeners, "purged")

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Notify of a use."""
        for notify in self._used:
            notify(node, num_bytes, now_s)

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Notify of a new leaf."""
        for notify in self._inserted:
            notify(leaf, now_s)

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Notify of a leaf that has grown."""
        for notify in self._grown:
            notify(leaf, num_new_blocks, now_s)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Notify of a split."""
        for notify in self._split:
            notify(lower, last_used_s, now_s)

    def cut(self, lower: Node) -> None:
        """Notify of a split by the cache itself."""
        for notify in self._cut:
            notify(lower)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Notify of a join."""
        for notify in self._joined:
            notify(uppers, lower)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Notify of an eviction."""
        for notify in self._evicted:
            notify(leaf, num_blocks, fingerprint, reason, now_s)

    def purged(self, node: Node) -> None:
        """Notify of a purge."""
        for notify in self._purged:
            notify(node)


def _overridden(listeners: tuple[Listener, ...], name: str) -> tuple[Callable[..., Any], ...]:
    """Return the method `name` of each listener whose class overrides it."""
    default_method = getattr(Listener, name)
    return tuple(
        getattr(listener, name) for listener in listeners if getattr(type(listener), name) is not default_method
    )
