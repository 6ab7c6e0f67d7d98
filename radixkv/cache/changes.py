"""Changes of the trees, and the listeners that are told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from radixkv.api.miss_reason import MissReason
from radixkv.cache.node import Node


class Listener:
    """Is told of every change to the trees of a cache. Each method does nothing; override those that matter.

    A listener changes no tree and no pool. All times are in seconds of the cache's clock.
    """

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        """A lease begins that found the first `num_bytes` of the path to the end of `node`.

        Called before `last_used_s` of the path changes. If `num_bytes` ends inside `node`, that node is not used yet:
        should the rest of the prompt be published, `node` is split, and `split` tells of the use.
        """

    def inserted(self, leaf: Node, now_s: float) -> None:
        """A new leaf was published."""

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """A leaf has more tokens than before, in `num_new_blocks` more blocks; 0 if its last block had room."""

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """A node was cut in two because a prompt shares its upper half only. That is a use of the upper half.

        `last_used_s` is the time of the use before this one. `lower` is the object that there was before the split.
        """

    def cut(self, lower: Node) -> None:
        """A node was cut in two for the cache's own purposes, not by a use. Both halves have its `policy_note`."""

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Nodes that followed each other, without branches, are one now: `lower`. The others are gone.

        Called after `lower` has the tokens and blocks of all. `uppers`, the topmost first, still have their own.
        """

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """The last `num_blocks` blocks of a leaf, perhaps all, are about to leave the cache.

        `fingerprint` is that of the first of them, `reason` what a later miss there is explained by.
        """

    def purged(self, node: Node) -> None:
        """A node is taken out by a purge, alone or with its whole tree. Called before its blocks are gone."""


class Changes(Listener):
    """Tells listeners of each change, in their order.

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
        """Tell of a use."""
        for tell in self._used:
            tell(node, num_bytes, now_s)

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Tell of a new leaf."""
        for tell in self._inserted:
            tell(leaf, now_s)

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Tell of a leaf that has grown."""
        for tell in self._grown:
            tell(leaf, num_new_blocks, now_s)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Tell of a split."""
        for tell in self._split:
            tell(lower, last_used_s, now_s)

    def cut(self, lower: Node) -> None:
        """Tell of a cut."""
        for tell in self._cut:
            tell(lower)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Tell of a join."""
        for tell in self._joined:
            tell(uppers, lower)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Tell of an eviction."""
        for tell in self._evicted:
            tell(leaf, num_blocks, fingerprint, reason, now_s)

    def purged(self, node: Node) -> None:
        """Tell of a purge."""
        for tell in self._purged:
            tell(node)


def _overridden(listeners: tuple[Listener, ...], name: str) -> tuple[Callable[..., Any], ...]:
    """The method `name` of each listener whose class has one of its own."""
    ours = getattr(Listener, name)
    return tuple(getattr(listener, name) for listener in listeners if getattr(type(listener), name) is not ours)
