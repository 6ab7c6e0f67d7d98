"""Records changes of the trees, and turns them into numbered event batches between two steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from radixkv.api.events import Event
from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node, path_to
from radixkv.errors import InvariantViolation, RadixKVError
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.snapshot import Snapshot, StoredRun
from radixkv.events.store_feed import StoreFeed
from radixkv.events.stored_blocks import Change, MergedNodes, StoredBlocks
from radixkv.invocation import InvocationMarks
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.tokens import TOKEN_BYTES

MAX_STEP_BLOCKS = 2048  # hashing them takes 0.6 ms
# In batches. Reading the batches since an older snapshot would take longer than reading a new snapshot.
_MAX_SNAPSHOT_AGE = 1000

_logger = logging.getLogger(__name__)


class TreeFeed(Listener):
    """Feeds an event log from the trees of one cache, on one thread.

        commit, evict, purge ── note ──▶ [ change, change ... ] ── publish, after a step ──▶ batch ──▶ log
        first reader ── every node ─────────▲

    Nothing is recorded before `switch_on`; until then, a change tests one flag. After that, a change of a tree records
    a few references, and `publish` hashes the new tokens. After a maximum number of blocks, the remaining changes wait
    for the next step; a change is not divided.

    Args:
        log: receives the batches.
        block_size: tokens per event block.
        pool_block_size: tokens per block of the pool.
        identities: published names of namespaces.
        max_step_blocks: number of hashed blocks per step after which no further change is processed. If steps compute
            more blocks, the backlog grows.
        marks: marks of invoked adapters. The tokens that these computed are not published, since no reader could match
            them.

    Attributes:
        log: see above.
    """

    def __init__(
        self,
        log: EventLog,
        block_size: int,
        pool_block_size: int,
        identities: Identities,
        max_step_blocks: int = MAX_STEP_BLOCKS,
        marks: InvocationMarks | None = None,
    ) -> None:
        self.log = log
        self._store_feed: StoreFeed | None = None
        self._block_size = block_size
        self._pool_block_size = pool_block_size
        self._identities = identities
        self._max_step_blocks = max_step_blocks
        self._marks = marks or InvocationMarks()
        self._is_aligned = pool_block_size % block_size == 0  # each node begins an event block
        self._is_on = False
        self._changes: deque[Change] = deque()
        self._note = self._changes.append
        self._stored_blocks = StoredBlocks(block_size, pool_block_size, identities)
        self._nodes: Callable[[], Iterable[Node]] = tuple
        self._snapshot: Snapshot | None = None
        self._snapshot_requests: list[Future[Snapshot]] = []

    @property
    def has_backlog(self) -> bool:
        """Whether changes wait to be published."""
        return bool(self._changes) or bool(self._snapshot_requests) or self._stores_have_pending_changes

    @property
    def _stores_have_pending_changes(self) -> bool:
        return self._store_feed is not None and self._store_feed.has_pending_changes

    def follow(self, offload_index: OffloadIndex) -> None:
        """Also record changes of the stores, from `switch_on` on."""
        self._store_feed = StoreFeed(offload_index.tiers, self._block_size, self._pool_block_size, self._identities)
        offload_index.subscribe(self._store_feed)

    def switch_on(self, nodes: Callable[[], Iterable[Node]]) -> None:
        """Record changes from now on, and everything that is cached. Calling it again does nothing.

        Args:
            nodes: yields all nodes of the cache, parents before children.

        Complexity: O(nodes).
        """
        if not self._is_on and self.log.error is None:
            self._is_on = True
            self._nodes = nodes
            if self._store_feed is not None:
                self._store_feed.switch_on()
            self._changes.extend((node, self._plain(node), node.parent, self._tail(node)) for node in nodes())

    def request_snapshot(self, answer: Future[Snapshot]) -> None:
        """Request a snapshot, which `publish` sets as the result of `answer` when everything recorded is published."""
        self._snapshot_requests.append(answer)
        if self.log.error is not None:
            self.close(self.log.error)  # sets the error on `answer`

    def publish(self) -> None:
        """Publish the oldest recorded changes as one batch; later ones wait for the next call. Call it after each step.

        An exception, which would be a bug, is logged and ends the event log; requests continue.
        """
        if self._is_on and self.has_backlog:
            try:
                self._publish()
            except Exception:
                _logger.exception("cache events could not be published; the event log ends")
                self.close(InvariantViolation("events: they could not be published; the server's log has the cause"))

    def _publish(self) -> None:
        events: tuple[Event, ...] = self._stored_blocks.process(self._changes, self._max_step_blocks)
        if self._store_feed is not None:
            events = (*events, *self._store_feed.take(self._max_step_blocks))
        if events:
            self.log.append(events)
        if self._snapshot is not None and self._age_of(self._snapshot) > _MAX_SNAPSHOT_AGE:
            self._snapshot = None
        if self._snapshot_requests and not self._changes and not self._stores_have_pending_changes:
            # A reader of an earlier snapshot also needs all batches after it.
            if self._snapshot is None or self._snapshot.sequence_number + 1 < self.log.first:
                self._snapshot = self._take_snapshot()
            requests, self._snapshot_requests = self._snapshot_requests, []
            for answer in requests:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(self._snapshot)

    def close(self, error: RadixKVError) -> None:
        """Stop recording. Readers get `error`."""
        self._is_on = False
        self._changes.clear()
        if self._store_feed is not None:
            self._store_feed.close()
        self.log.close(error)
        requests, self._snapshot_requests = self._snapshot_requests, []
        for answer in requests:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Record a new leaf."""
        if self._is_on:
            tail = b"" if self._is_aligned else self._tail(leaf)
            self._note((leaf, self._plain(leaf), leaf.parent, tail))

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Record the new tokens of a leaf that was extended."""
        if self._is_on:
            tail = b"" if self._is_aligned else self._tail(leaf)
            self._note((leaf, self._plain(leaf), None, tail))

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Record where a node was split."""
        if self._is_on:
            upper = lower.parent
            assert upper is not None
            self._note((lower, upper, upper.tokens))

    def cut(self, lower: Node) -> None:
        """Record where a node was split."""
        self.split(lower, 0.0, 0.0)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Record which nodes were merged."""
        if self._is_on:
            self._note(MergedNodes(uppers, lower))

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Record how many tokens of a leaf remain."""
        if self._is_on:
            self._note((leaf, (leaf.num_blocks - num_blocks) * self._pool_block_size))

    def purged(self, node: Node) -> None:
        """Record a purged node."""
        if self._is_on:
            self._note((node,))

    def _age_of(self, snapshot: Snapshot) -> int:
        return self.log.last - snapshot.sequence_number

    def _take_snapshot(self) -> Snapshot:
        """List the blocks of all nodes; no token is hashed.

        Complexity: O(nodes), and O(depth) for each node if nodes may begin inside an event block.
        """
        runs = []
        for node in self._nodes():
            before, hashes, num_shared = self._stored_blocks.run_of(node)
            root, cache_salt = self._identities.of(node.owner.namespace)
            tail = b"" if self._is_aligned else self._tail(node)
            runs.append(StoredRun(root, cache_salt, before, hashes, num_shared, tail, node.tokens))
        tracked_blocks = [] if self._store_feed is None else self._store_feed.tracked_blocks()
        return Snapshot(self.log.last, runs, self._block_size, tracked_blocks)

    def _plain(self, node: Node) -> bytes:
        """Return a node's tokens up to the first one that an invoked adapter computed."""
        return node.tokens[: self._marks.num_plain(node.tokens) * TOKEN_BYTES]

    def _tail(self, node: Node) -> bytes:
        """Return those tokens of the event block in which a node begins that precede the node. Complexity: O(depth)."""
        if self._is_aligned:
            return b""
        start_bytes = sum(len(above.tokens) for above in path_to(node.parent))
        tail_bytes = start_bytes % (self._block_size * TOKEN_BYTES)
        tail, above = b"", node.parent
        while len(tail) < tail_bytes and above is not None:
            tail = above.tokens[-(tail_bytes - len(tail)) :] + tail
            above = above.parent
        return tail
