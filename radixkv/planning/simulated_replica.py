"""A replica of a simulated fleet: a real cache with its event log, and a device that computes one prompt at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from radixkv.api.events import EventBatch
from radixkv.cache.lease import Lease
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.tree_feed import TreeFeed
from radixkv.namespace import Namespace
from radixkv.routing.router import Route
from radixkv.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Job:
    """A request that a replica was sent.

    Attributes:
        index: in the trace.
        arrival_s: when it was sent.
        tokens: the prompt, little-endian uint32 bytes.
        route: as it was routed.
    """

    index: int
    arrival_s: float
    tokens: bytes
    route: Route


class SimulatedReplica:
    """Computes prompts in the order in which they came, each as a whole, in time in proportion to its uncached tokens.

    Args:
        name: of the replica.
        num_blocks, block_size, policy, probation_share: of its cache; a block of its events is one of its pool.
        namespace: of all requests.
        identities: names of namespaces, as the router has them.
        compute_s: seconds to compute a token.
        clock: seconds of the simulation.

    Attributes:
        computed_tokens, cached_tokens: of the prompts that are finished.
        waits_s: times from sending to the end, of each.
    """

    def __init__(
        self,
        name: str,
        *,
        num_blocks: int,
        block_size: int,
        policy: str,
        probation_share: float,
        namespace: Namespace,
        identities: Identities,
        compute_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.computed_tokens = self.cached_tokens = 0
        self.waits_s: list[float] = []
        self._namespace = namespace
        self._compute_s = compute_s
        self._clock = clock
        self._queue: deque[Job] = deque()
        self._running: tuple[Job, Lease | None, int] | None = None
        self._log = EventLog(clock=lambda: clock() + 1.0)  # from 1: number 0 asks for a snapshot
        self._feed = TreeFeed(self._log, block_size, block_size, identities)
        self._read = self._log.start
        self._cache = PrefixCache(
            num_blocks,
            block_size,
            policy=make_policy(policy, num_blocks),
            probation_share=probation_share,
            evicted_prefixes=0,
            listeners=[self._feed],
            clock=clock,
        )
        self._feed.switch_on(self._cache.nodes)

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks that its cache evicted."""
        return self._cache.num_evicted_blocks

    @property
    def number(self) -> int:
        """Number of the last batch that was read."""
        return self._read

    def send(self, job: Job) -> float | None:
        """Put a request into the queue. Returns when its computing ends, if it begins at once."""
        self._queue.append(job)
        return self._begin() if self._running is None else None

    def end(self) -> tuple[Job, int, float | None]:
        """End the request that is computed, and begin the next.

        Returns:
            The request, the tokens that it computed, and when the next one ends; None if there is none.
        """
        assert self._running is not None
        job, lease, computed_tokens = self._running
        if lease is not None:
            lease.commit(lease.num_tokens)
            lease.close()
            self._feed.publish()
        self.computed_tokens += computed_tokens
        self.cached_tokens += len(job.tokens) // TOKEN_BYTES - computed_tokens
        self.waits_s.append(self._clock() - job.arrival_s)
        self._running = None
        return job, computed_tokens, self._begin() if self._queue else None

    def news(self) -> Iterator[EventBatch]:
        """Iterate over the batches since the last call."""
        while (batch := self._log.after(self._read)) is not None:
            self._read = batch.sequence_number
            yield batch

    def _begin(self) -> float:
        job = self._queue.popleft()
        num_tokens = len(job.tokens) // TOKEN_BYTES
        lease = None
        if num_tokens <= self._cache.pool.num_blocks * self._cache.block_size:
            lease = self._cache.lease(self._namespace, job.tokens)
        computed_tokens = num_tokens - (lease.cached_tokens if lease is not None else 0)
        self._running = job, lease, computed_tokens
        return self._clock() + computed_tokens * self._compute_s
