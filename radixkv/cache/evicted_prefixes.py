"""Prefixes that left the cache, remembered so that a later miss can be explained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace, PromptKey
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint

_T = TypeVar("_T")


class EvictedPrefixes(Listener):
    """Remembers why prefixes were evicted: the newest `capacity` of them, by fingerprint.

    Prefixes of an adapter that drains are remembered as well. All else that is purged is forgotten.

    A fingerprint only explains a miss. It never decides what is reused, so a collision costs a wrong `miss_reason` in
    one answer and nothing else.

    Args:
        capacity: prefixes to remember.
        marks: tell what invoked adapters computed.
    """

    def __init__(self, capacity: int, marks: InvocationMarks) -> None:
        self._capacity = capacity
        self._marks = marks
        self._reasons: OrderedDict[int, MissReason] = OrderedDict()
        self._draining: set[str] = set()  # digests of adapters

    def __len__(self) -> int:
        return len(self._reasons)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Note why a prefix left; forget the oldest note when full. Complexity: O(1)."""
        self._note(fingerprint, reason)

    def purged(self, node: Node) -> None:
        """Note that a node goes with its adapter, if that drains. Complexity: O(1)."""
        if self._draining and self._draining & {node.owner.namespace.adapter, self._marks.digest_of(node.tokens)}:
            self._note(node.fingerprint, MissReason.ADAPTER_CHANGED)

    def draining(self, adapter: str, slices: Generator[None, None, _T]) -> Generator[None, None, _T]:
        """Run slices that forget an adapter, whose digest this is, and remember what goes."""
        self._draining.add(adapter)
        try:
            return (yield from slices)
        finally:
            self._draining.discard(adapter)

    def reason(self, fingerprint: int) -> MissReason | None:
        """Tell why the prefix with this fingerprint left; None if that is not known. Complexity: O(1)."""
        return self._reasons.get(fingerprint)

    def explain(
        self,
        namespace: Namespace,
        tokens: bytes,
        cached_tokens: int,
        next_end: int,
        former: Sequence[PromptKey],
        find: Callable[[Namespace, bytes], tuple[Node | None, int, int, bytes, int]],
    ) -> MissReason:
        """Tell why the tokens after the cached ones have to be computed; see `PrefixCache.explain`.

        Args:
            namespace, tokens, cached_tokens, former: as there.
            next_end: tokens up to the end of the next block.
            find: looks a prompt up; see `Ledger.find`.
        """
        end = next_end * TOKEN_BYTES
        lost = self.reason(prefix_fingerprint(namespace.seed, tokens, end))
        if lost is not None:  # an adapter that went, and came back with the same weights, has not changed
            return MissReason.EVICTED if lost is MissReason.ADAPTER_CHANGED else lost
        for key in former:
            lost = self.reason(prefix_fingerprint(key.namespace.seed, key.tokens, end))
            if lost is MissReason.ADAPTER_CHANGED or find(*key)[2] > cached_tokens:
                return MissReason.ADAPTER_CHANGED
        return MissReason.DIVERGED if cached_tokens else MissReason.COLD

    def _note(self, fingerprint: int, reason: MissReason) -> None:
        self._reasons[fingerprint] = reason
        self._reasons.move_to_end(fingerprint)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)
