"""An event source without an engine: a cache whose changes are published when a test stores or evicts blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.readers import EventSource
from radixkv.events.tree_feed import TreeFeed
from radixkv.namespace import Namespace

BLOCK_SIZE = 4
BASE = Namespace("m")
SALTED = Namespace("m", tenant="acme", salt="secret")


class FakeSource(EventSource):
    """A cache of blocks of four tokens. Calls run at once on the thread that makes them, not on an engine's thread.

    Attributes:
        cache: a cache in which no request has a lease.
        feed: records the changes of the cache.
        is_hanging: whether calls are cancelled, as the watchdog does when a step of an engine stalls.
    """

    def __init__(self, max_batches: int = 100, max_blocks: int = 10_000) -> None:
        self.feed = TreeFeed(EventLog(max_batches, max_blocks), BLOCK_SIZE, BLOCK_SIZE, Identities())
        self.cache = PrefixCache(4096, BLOCK_SIZE, listeners=[self.feed])
        self.is_hanging = False
        super().__init__(self.feed, self.cache.nodes, self._run)

    def store(self, *ids: int, namespace: Namespace = BASE) -> None:
        """Cache a prompt, and publish the events."""
        with self.cache.lease(namespace, np.array(ids, dtype="<u4").tobytes()) as lease:
            lease.commit(len(ids))
        self.feed.publish()

    def evict(self, num_blocks: int) -> None:
        """Evict blocks, and publish the events."""
        self.cache.evict(num_blocks)
        self.feed.publish()

    def _run(self, function: Callable[[], None]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.is_hanging:
            future.cancel()
        else:
            function()
            self.feed.publish()
            future.set_result(None)
        return future
