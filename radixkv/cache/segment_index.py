"""An index of all nodes of a cache, to list them in pages of bounded work."""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator

from radixkv.api.miss_reason import MissReason
from radixkv.api.segments import HEAT_HALF_LIFE_S, Segment, SegmentPage
from radixkv.cache.changes import Listener
from radixkv.cache.node import NO_NUMBER, Node
from radixkv.cache.retained_nodes import is_retained
from radixkv.errors import require_invariant
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES

# Maximum work of one call, so that it occupies the engine's thread for less than 1 ms: numbers that are scanned (2,048
# take 0.3 ms), nodes that are sorted by heat (512 take 0.5 ms), and segments that are created (256 take 0.3 ms).
MAX_PASSED = 2048
MAX_COMPARED = 512
MAX_SEGMENTS = 256

_require = functools.partial(require_invariant, "segment index")


class SegmentIndex(Listener):
    """Assigns each node the lowest free number, which it keeps as long as it is cached.

        numbers    0      1      2      3            a page of two: numbers 0 and 1; the next page begins at 2
                [ node | node | free | node ]

    Even if nodes change between the pages of a scan, the scan returns each node that stays cached throughout exactly
    once, and each node that is inserted or evicted meanwhile at most once. When a node is split, the lower half keeps
    the number, and the upper half is assigned a new one.

    Args:
        clock: the clock of the cache, in seconds.
        marks: identify the tokens that invoked adapters computed.
    """

    def __init__(self, clock: Callable[[], float], marks: InvocationMarks) -> None:
        self._clock = clock
        self._marks = marks
        self._nodes: list[Node | None] = []
        self._free: list[int] = []  # a heap, of numbers below the length of `_nodes`

    def __len__(self) -> int:
        return len(self._nodes) - len(self._free)

    def page(self, start: int, tenant: str | None = None, max_segments: int = MAX_SEGMENTS) -> SegmentPage:
        """List segments in the order of their numbers. A page may be empty although further pages follow.

        Args:
            start: the number to begin at.
            tenant: the tenant whose segments are listed; None for all tenants.
            max_segments: at most `MAX_SEGMENTS` are listed.

        Complexity: O(`MAX_PASSED`).
        """
        nodes: list[Node] = []
        number, end = start, min(start + MAX_PASSED, len(self._nodes))
        max_segments = min(max_segments, MAX_SEGMENTS)
        while number < end and len(nodes) < max_segments:
            node = self._nodes[number]
            number += 1
            if node is not None and (tenant is None or node.owner.namespace.tenant == tenant):
                nodes.append(node)
        return self._page(nodes, number, len(nodes))

    def hottest(
        self, start: int, stride: int, tenant: str | None = None, max_segments: int = MAX_SEGMENTS
    ) -> SegmentPage:
        """List the hottest segments among `MAX_COMPARED` numbers, and their ancestors in the tree.

        Args:
            start: the number to begin at.
            stride: distance between two numbers. In a large cache a distance above 1 lets a few calls sample all of it.
            tenant: the tenant whose segments are listed; None for all tenants.
            max_segments: at most `MAX_SEGMENTS` are listed.

        Returns:
            A page, unordered. A segment that is hot because many others continue it is listed as soon as one of these
            is among those with these numbers.

        Complexity: O(`MAX_COMPARED` log `MAX_COMPARED`).
        """
        end = start + stride * MAX_COMPARED
        nodes = [
            node
            for node in self._nodes[start:end:stride]
            if node is not None and (tenant is None or node.owner.namespace.tenant == tenant)
        ]
        nodes.sort(key=_log_heat, reverse=True)
        max_segments = min(max_segments, MAX_SEGMENTS)
        listed: dict[int, Node] = {}  # by number
        for hot in nodes:
            node: Node | None = hot
            while len(listed) < max_segments and node is not None and node.segment_number not in listed and node.parent:
                listed[node.segment_number] = node
                node = node.parent
        return self._page(listed.values(), end, len(nodes))

    def node_with(self, number: int) -> Node | None:
        """Return the node that has a number; None if the number is free."""
        return self._nodes[number] if 0 <= number < len(self._nodes) else None

    def page_of(self, nodes: Iterable[Node]) -> SegmentPage:
        """Return a page with the segments of these nodes."""
        listed = list(nodes)
        return self._page(listed, len(self._nodes), len(listed))

    def tokens_by_adapter(self) -> Generator[None, None, Counter[str]]:
        """Count the cached tokens of each adapter, by digest, in slices of `MAX_PASSED` numbers that end with `yield`.

        Nodes that change between slices may be counted twice or not at all.
        """
        counts: Counter[str] = Counter()
        for nodes in self.slices():
            for node in nodes:
                num_tokens = len(node.tokens) // TOKEN_BYTES
                num_plain = self._marks.num_plain(node.tokens)
                counts[node.owner.namespace.adapter] += num_plain
                if num_plain < num_tokens:
                    counts[self._marks.digest_of(node.tokens)] += num_tokens - num_plain
            yield
        return counts

    def namespaces_invoking(self, digest: str) -> Generator[None, None, set[Namespace]]:
        """Find the namespaces in which anything is cached with an invoked adapter, in slices."""
        namespaces: set[Namespace] = set()
        if self._marks.has(digest):
            for nodes in self.slices():
                namespaces |= {node.owner.namespace for node in nodes if self._marks.digest_of(node.tokens) == digest}
                yield
        return namespaces

    def slices(self) -> Iterator[list[Node]]:
        """Iterate over all nodes, `MAX_PASSED` numbers at a time. Each slice reads the nodes when it is requested."""
        start = 0
        while start < len(self._nodes):
            yield [node for node in self._nodes[start : start + MAX_PASSED] if node is not None]
            start += MAX_PASSED

    def _page(self, nodes: Iterable[Node], next_start: int, num_compared: int) -> SegmentPage:
        now_s = self._clock()
        end_number = len(self._nodes)
        return SegmentPage(
            segments=tuple(_segment(node, self._namespace_of(node), now_s) for node in nodes),
            next_start=next_start if next_start < end_number else None,
            end_number=end_number,
            num_segments=len(self),
            num_compared=num_compared,
        )

    def _namespace_of(self, node: Node) -> Namespace:
        """Return a node's namespace, with the adapter that computed its last token."""
        invoked = self._marks.digest_of(node.tokens)
        return node.owner.namespace._replace(adapter=invoked) if invoked else node.owner.namespace

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Assign a number to a new leaf."""
        self._add(leaf)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Assign a number to the upper half."""
        self.cut(lower)

    def cut(self, lower: Node) -> None:
        """Assign a number to the upper half."""
        upper = lower.parent
        assert upper is not None
        self._add(upper)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Free the numbers of the nodes that were joined into another."""
        for upper in uppers:
            self._remove(upper)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Free the number of a leaf that is evicted as a whole."""
        if num_blocks == leaf.num_blocks:
            self._remove(leaf)

    def purged(self, node: Node) -> None:
        """Free the number of a node."""
        self._remove(node)

    def _add(self, node: Node) -> None:
        if self._free:
            node.segment_number = heapq.heappop(self._free)
            self._nodes[node.segment_number] = node
        else:
            node.segment_number = len(self._nodes)
            self._nodes.append(node)

    def _remove(self, node: Node) -> None:
        """Free a node's number. Complexity: O(log free numbers)."""
        self._nodes[node.segment_number] = None
        heapq.heappush(self._free, node.segment_number)
        node.segment_number = NO_NUMBER
        if len(self._free) == len(self._nodes):  # no nodes are left, so free the memory
            self._nodes = []
            self._free = []

    def check(self, nodes: Iterable[Node]) -> None:
        """Compare the numbers with the nodes of the trees. Complexity: O(nodes).

        Raises:
            InvariantViolation: the message names the inconsistency.
        """
        num_nodes = 0
        for node in nodes:
            num_nodes += 1
            _require(
                0 <= node.segment_number < len(self._nodes) and self._nodes[node.segment_number] is node,
                "a node has no number",
            )
        _require(len(self) == num_nodes, "a number belongs to a node outside every tree")
        _require(all(self._nodes[number] is None for number in self._free), "the number of a node is free")


def _log_heat(node: Node) -> float:
    """Return a sort key that orders nodes by heat at any time."""
    return math.log2(node.num_uses + 1) + node.last_used_s / HEAT_HALF_LIFE_S


def _segment(node: Node, namespace: Namespace, now_s: float) -> Segment:
    parent, expiry = node.parent, node.expiry_entry
    idle_s = max(0.0, now_s - node.last_used_s)
    return Segment(
        node.segment_number,
        None if parent is None or parent.segment_number == NO_NUMBER else parent.segment_number,
        namespace,
        node.start_bytes // TOKEN_BYTES,
        len(node.tokens) // TOKEN_BYTES,
        node.num_blocks,
        len(node.children or ()),
        node.num_uses,
        idle_s,
        (node.num_uses + 1) * 2 ** (-idle_s / HEAT_HALF_LIFE_S),
        node.ref_count,
        node.priority,
        is_retained(node),
        None if expiry is None else max(0.0, expiry[0] - now_s),
        "" if node.session is None else node.session.session_id,
        node.awaits,
    )
