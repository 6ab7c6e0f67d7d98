"""The routing rule: one pure function from what is known of the replicas to the one that gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from radixkv.errors import NoReplica
from radixkv.routing.candidate import NO_HITS, Candidate, Hits


@dataclass(frozen=True, slots=True)
class Rule:
    """The weights of the rule.

    Attributes:
        least_match_tokens: fewer tokens than these are no reason to go to a replica. All prompts of a model may begin
            alike for some hundred tokens, and all would go where the first of them went.
        queue_weight: what a second in a queue counts beside a second of computing. Waiting delays one request;
            computing again what is cached elsewhere delays all.
        balance: part of what a replica computed of late that counts as if it was still in its queue. It makes even what
            queues do not show, because they are empty.
        home_share: part of a replica's time that requests for one prefix may take before another replica gets it too.
        slack_s: costs that differ by less are equal. Among equals the prefix decides, the same way in each router.
    """

    least_match_tokens: int = 1024
    queue_weight: float = 0.1
    balance: float = 0.1
    home_share: float = 0.8
    slack_s: float = 1e-3


DEFAULT_RULE = Rule()


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that is to be routed.

    Attributes:
        prompt_tokens: length of its prompt.
        key: of the longest prefix that a replica has, or of the prompt's beginning if none has any. Equal for equal
            prefixes.
        demand: replicas that requests for that prefix would have kept busy of late.
    """

    prompt_tokens: int
    key: int = 0
    demand: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica that gets a request.

    Attributes:
        index: of the candidate.
        hits: what it has of the prompt.
        cost_s: seconds that it costs there.
        is_new_home: it computes a prefix that others have, because they can't serve all who want it.
    """

    index: int
    hits: Hits
    cost_s: float
    is_new_home: bool = False


def choose(wish: Wish, candidates: Sequence[Candidate], rule: Rule = DEFAULT_RULE) -> Choice:
    """Choose the replica where a request costs least: what must be computed or loaded there, and what waits before it.

    Where a prefix is wanted more than the replicas that have it can serve, computing it once more is not counted
    against the others: the one that has least to do becomes another home.

    Args:
        wish: the request.
        candidates: replicas that may get it, in any order: the order decides nothing.
        rule: weights.

    Returns:
        The choice; the same for the same arguments.

    Raises:
        NoReplica: there is no candidate.

    Complexity: O(candidates).
    """
    if not candidates:
        raise NoReplica("replicas: expected at least one that may get the request, got none")
    totals = [sum(each.hits) for each in candidates]
    useful = [each.hits for each in candidates]
    for index, total in enumerate(totals):
        if total < rule.least_match_tokens:
            totals[index], useful[index] = 0, NO_HITS
    longest = max(totals)
    homes = sum(longest - total < rule.least_match_tokens for total in totals) if longest else 0
    is_wanted_more = bool(longest) and wish.demand > homes * rule.home_share
    if is_wanted_more:
        useful = [Hits(device=longest) if total < longest else hits for hits, total in zip(useful, totals, strict=True)]
    prompt_tokens, queue_weight, balance = wish.prompt_tokens, rule.queue_weight, rule.balance
    costs = [
        times.seconds(prompt_tokens, hits) + queue_weight * ((queue_tokens + balance * recent_tokens) * times.compute_s)
        for hits, (_, _, queue_tokens, recent_tokens, times) in zip(useful, candidates, strict=True)
    ]
    least, slack_s = min(costs), rule.slack_s
    equals = [index for index, cost_s in enumerate(costs) if cost_s - least < slack_s]
    best = max(equals, key=lambda index: (totals[index], _draw(wish.key, candidates[index].name)))
    return Choice(best, candidates[best].hits, costs[best], is_wanted_more and totals[best] < longest)


def _draw(key: int, name: str) -> int:
    """Draw a number for a prefix and a replica: the highest one wins (rendezvous hashing), wherever it is drawn."""
    return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"), seed=key & (2**64 - 1))
