"""Routes requests: asks what each replica has, lets the rule choose, and remembers what was sent."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from radixkv.api.events import EventBatch
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.routing.candidate import DEFAULT_TIMES, Candidate, Hits, TokenTimes
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.prompt_blocks import PromptBlocks
from radixkv.routing.routings import Routing
from radixkv.routing.rule import Wish


@dataclass(frozen=True, slots=True)
class Route:
    """The replica to which a request goes.

    Attributes:
        name: of the replica.
        hits: what it is supposed to have of the prompt.
        is_new_home: it computes a prefix that others have, because these can't serve all who want it.
        ticket: to tell the request's end with.
        most_tokens: the most that any replica is supposed to have of it.
        queue_tokens: tokens that it computes before, as far as this tenant's share of the replica makes it wait.
    """

    name: str
    hits: Hits
    is_new_home: bool
    ticket: int
    most_tokens: int = 0
    queue_tokens: int = 0


class Router:
    """Sends each request to one of its replicas.

        request ──▶ hashes ──▶ view: hits of each replica ──┐
                               load: queues ────────────────┼─▶ rule ──▶ replica; view and load expect it there
                               demand for the prefix ───────┘

    It belongs to one thread. What takes longest for a new prompt, to hash and note all of it, is done after the choice:
    by `remember`, or else before the next call.

    Args:
        view: what replicas have.
        load: what replicas have yet to compute.
        demand: what is wanted.
        choose: the rule.
        identities: names of namespaces, see `PromptBlocks`.
        times: of a token on a replica, by name; asked for each request.

    Attributes:
        view, load: the same.
    """

    def __init__(
        self,
        view: FleetView,
        load: FleetLoad,
        demand: PrefixDemand,
        choose: Routing,
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
        self._unnoted: tuple[str, PromptBlocks, int] | None = None

    def join(self, name: str) -> None:
        """Add a replica of which nothing is known."""
        self.remember()
        self.view.join(name)
        self.load.join(name)

    def leave(self, name: str) -> None:
        """Forget a replica."""
        self.remember()
        self.view.leave(name)
        self.load.leave(name)

    def read(self, name: str, batch: EventBatch) -> bool:
        """Learn from a batch of a replica's events; see `FleetView.read`."""
        self.remember()
        return self.view.read(name, batch)

    def route(self, namespace: Namespace, tokens: bytes, avoid: Container[str] = ()) -> Route:
        """Choose a replica, and expect the request there from the next call on.

        Args:
            namespace: of the request. What another namespace has is never counted.
            tokens: the prompt, little-endian uint32 bytes.
            avoid: replicas that must not get it, such as one that just failed.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.
            NoReplica: no replica is left.

        Complexity: O(blocks that some replica has + replicas); `remember` takes O(blocks).
        """
        self.remember()
        self.view.tidy()
        blocks = PromptBlocks(namespace, tokens, self.view.block_size, self._identities)
        names = [name for name in self.view.names if name not in avoid]
        candidates, wish, most_tokens = self._ask(blocks, names, namespace.tenant)
        choice = self._choose(wish, candidates)
        name, times = names[choice.index], candidates[choice.index].times
        computed_tokens = blocks.num_tokens - choice.hits.total
        self._unnoted = name, blocks, choice.hits.device // self.view.block_size
        self._demand.add(wish.key, computed_tokens * times.compute_s)
        ticket = self.load.sent(name, computed_tokens, namespace.tenant)
        queue_tokens = int(candidates[choice.index].queue_tokens)
        return Route(name, choice.hits, choice.is_new_home, ticket, most_tokens, queue_tokens)

    def remember(self) -> None:
        """Note what was routed last. To be called when its caller has the answer; once more changes nothing."""
        if self._unnoted is not None:
            name, blocks, num_matched = self._unnoted
            self._unnoted = None
            self.view.expect(name, blocks.all(), num_matched)

    def finished(self, route: Route, computed_tokens: int | None = None) -> bool:
        """Note the end of a request, well or not. Telling it again changes nothing.

        Args:
            route: of the request.
            computed_tokens: what the replica did compute; None if that is not known.

        Returns:
            Whether it was under way.
        """
        return self.load.finished(route.name, route.ticket, computed_tokens)

    def _ask(self, blocks: PromptBlocks, names: list[str], tenant: str) -> tuple[list[Candidate], Wish, int]:
        """Find what each replica has, and the most that one has, no further along the prompt than any has something."""
        while not blocks.is_all and self.view.index.holders_of(blocks.hash_on()[-1]):
            pass
        hits = self.view.match(blocks.hashes, names)
        totals = [sum(found) for found in hits]
        most_tokens = max(totals, default=0)
        key = blocks.hashes[max(0, most_tokens // self.view.block_size - 1)] if blocks.hashes else 0
        waits = self.load.waits(names, tenant, [blocks.num_tokens - total for total in totals])
        candidates = [
            Candidate(name, found, wait_tokens, recent_tokens, self._times(name))
            for name, found, (wait_tokens, recent_tokens) in zip(names, hits, waits, strict=True)
        ]
        return candidates, Wish(blocks.num_tokens, key, self._demand.of(key)), most_tokens
