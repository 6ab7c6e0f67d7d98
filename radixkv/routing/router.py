"""Routes requests: matches each prompt with the caches of the replicas, applies the policy, and records the choice."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from radixkv.api.events import EventBatch
from radixkv.errors import NoReplica
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.routing.candidate import DEFAULT_TIMES, Candidate, Hits, TokenTimes
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.policies import RoutedPrompt, RoutingPolicy
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.prompt_blocks import PromptBlocks


@dataclass(frozen=True, slots=True)
class Route:
    """The replica to which a request is sent.

    Attributes:
        name: name of the replica.
        hits: prompt tokens that the replica is expected to have cached.
        is_new_home: whether the replica computes a prefix that other replicas have, since they can't serve all requests
            for it.
        ticket: identifies the request in `finished`.
        max_hit_tokens: the largest number of prompt tokens that any replica is expected to have cached, except replicas
            that were avoided.
        queue_tokens: tokens that the replica computes before this request, given the tenant's fair share.
    """

    name: str
    hits: Hits
    is_new_home: bool
    ticket: int
    max_hit_tokens: int = 0
    queue_tokens: int = 0


class Router:
    """Chooses a replica for each request.

        request ──▶ hashes ──▶ view: hits of each replica ──┐
                               load: queues ────────────────┼─▶ policy ──▶ replica; all three record the request
                               demand for the prefix ───────┘

    It is not thread-safe. The slowest step for a new prompt, hashing and recording all of its blocks, happens after the
    choice: in `remember`, or at the latest in the next call.

    Args:
        view: the cached blocks of the replicas.
        load: the unfinished requests of the replicas.
        demand: the demand for each prefix.
        choose: the routing policy.
        identities: published names of namespaces, see `PromptBlocks`.
        times: returns the times per token on the replica with this name; called for each request.

    Attributes:
        view, load: see above.
    """

    def __init__(
        self,
        view: FleetView,
        load: FleetLoad,
        demand: PrefixDemand,
        choose: RoutingPolicy,
        *,
        identities: Identities,
        times: Callable[[str], TokenTimes] = lambda name: DEFAULT_TIMES,
    ) -> None:
        self.view = view
        self.load = load
        self._demand = demand
        self._choose = choose
        self._identities = identities
        self._times = times
        # The last routed prompt, until `remember`: its replica, its blocks, and how many of them are on that device.
        self._unrecorded: tuple[str, PromptBlocks, int] | None = None

    def join(self, name: str) -> None:
        """Add a replica with an empty cache."""
        self.remember()
        self.view.join(name)
        self.load.join(name)

    def leave(self, name: str) -> None:
        """Remove a replica."""
        self.remember()
        self.view.leave(name)
        self.load.leave(name)

    def read(self, name: str, batch: EventBatch) -> bool:
        """Apply a batch of events of a replica; see `FleetView.read`."""
        self.remember()
        return self.view.read(name, batch)

    def route(self, namespace: Namespace, tokens: bytes, avoid: Container[str] = ()) -> Route:
        """Choose a replica. From the next call on, the prompt is expected on it.

        Args:
            namespace: namespace of the request. Only blocks of this namespace match.
            tokens: the prompt, little-endian uint32 bytes.
            avoid: replicas that must not be chosen, such as one that just failed.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.
            NoReplica: no replica is left.

        Complexity: O(blocks that some replica has + replicas); `remember` takes O(blocks).
        """
        self.remember()
        self.view.tidy()
        blocks = PromptBlocks(namespace, tokens, self.view.block_size, self._identities)
        names = [name for name in self.view.names if name not in avoid]
        if not names:
            raise NoReplica("replicas: expected at least one that may get the request, got none")
        candidates, prompt, max_hit_tokens = self._match_replicas(blocks, names, namespace.tenant)
        choice = self._choose(prompt, candidates)
        name = names[choice.index]
        times = candidates[choice.index].times
        computed_tokens = blocks.num_tokens - choice.hits.total
        self._unrecorded = name, blocks, choice.hits.device // self.view.block_size
        self._demand.add(prompt.key, computed_tokens * times.compute_s)
        ticket = self.load.sent(name, computed_tokens, namespace.tenant)
        queue_tokens = int(candidates[choice.index].queue_tokens)
        return Route(name, choice.hits, choice.is_new_home, ticket, max_hit_tokens, queue_tokens)

    def remember(self) -> None:
        """Record the blocks of the last routed prompt. Call it after answering; calling it again does nothing."""
        if self._unrecorded is not None:
            name, blocks, num_matched = self._unrecorded
            self._unrecorded = None
            self.view.expect(name, blocks.all(), num_matched)

    def finished(self, route: Route, computed_tokens: int | None = None) -> bool:
        """Record the end of a request, successful or not. Calling it again does nothing.

        Args:
            route: the route of the request.
            computed_tokens: number of tokens that the replica computed; None if unknown.

        Returns:
            Whether the request was in flight.
        """
        return self.load.finished(route.name, route.ticket, computed_tokens)

    def _match_replicas(
        self, blocks: PromptBlocks, names: list[str], tenant: str
    ) -> tuple[list[Candidate], RoutedPrompt, int]:
        """Match the prompt with each replica, and look up the load of the replicas.

        Returns:
            The candidates, the prompt for the policy, and the largest number of tokens that any candidate has cached.
        """
        while not blocks.are_all_hashed:  # hash blocks only as far as any replica has them
            last_hash = blocks.hash_next()[-1]
            if not self.view.index.holders_of(last_hash):
                break
        hits = self.view.match(blocks.hashes, names)
        hit_tokens = [sum(replica_hits) for replica_hits in hits]
        max_hit_tokens = max(hit_tokens, default=0)
        prefix_key = 0
        if blocks.hashes:
            num_matched_blocks = max_hit_tokens // self.view.block_size
            prefix_key = blocks.hashes[max(0, num_matched_blocks - 1)]
        waits = self.load.waits(names, tenant, [blocks.num_tokens - cached_tokens for cached_tokens in hit_tokens])
        candidates = [
            Candidate(name, replica_hits, wait_tokens, recent_tokens, self._times(name))
            for name, replica_hits, (wait_tokens, recent_tokens) in zip(names, hits, waits, strict=True)
        ]
        return candidates, RoutedPrompt(blocks.num_tokens, prefix_key, self._demand.of(prefix_key)), max_hit_tokens
