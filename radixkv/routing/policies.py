"""Routing policies: functions from a prompt and the state of the replicas to the replica that gets the request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from radixkv.errors import ConfigError
from radixkv.routing.candidate import NO_HITS, Candidate, Hits


@dataclass(frozen=True, slots=True)
class RoutingWeights:
    """The weights of the policy `prefix`.

    Attributes:
        least_match_tokens: a shorter cached prefix is ignored. All prompts of a model may share a few hundred tokens,
            and would otherwise all be sent to the same replica.
        queue_weight: cost of a second in the queue relative to a second of computing. Waiting delays one request;
            recomputing tokens that are cached on another replica delays all requests.
        balance: fraction of the recently computed tokens of a replica that counts as if it were still in the queue. It
            balances the load of replicas whose queues are empty.
        home_share: fraction of a replica's time that requests for one prefix may take before another replica computes
            the prefix as well.
        slack_s: costs that differ by less count as equal. The longest cached prefix then decides, and among equal ones
            the hash of the prefix and the replica's name, which is the same in every router.
    """

    least_match_tokens: int = 1024
    queue_weight: float = 0.1
    balance: float = 0.1
    home_share: float = 0.8
    slack_s: float = 1e-3


DEFAULT_WEIGHTS = RoutingWeights()


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """The prompt of a request that is to be routed.

    Attributes:
        prompt_tokens: length of the prompt in tokens.
        key: hash of the longest prefix that a replica has, or of the first block if no replica has any; 0 if the
            prompt has no full block. Equal prefixes have equal keys.
        demand: number of replicas that recent requests for this prefix would have kept busy.
    """

    prompt_tokens: int
    key: int = 0
    demand: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """The replica that gets a request.

    Attributes:
        index: index of the candidate.
        hits: prompt tokens that are cached on the replica, by tier.
        cost_s: cost of the request on the replica, in seconds; 0 with any policy but `prefix`.
        is_new_home: whether the replica computes a prefix that other replicas have, since demand exceeds what they can
            serve.
    """

    index: int
    hits: Hits
    cost_s: float
    is_new_home: bool = False


RoutingPolicy = Callable[[RoutedPrompt, Sequence[Candidate]], ReplicaChoice]

PREFIX = "prefix"
_THRESHOLD_SHARE = 0.3  # the default of SGLang's gateway


def choose(
    prompt: RoutedPrompt, candidates: Sequence[Candidate], weights: RoutingWeights = DEFAULT_WEIGHTS
) -> ReplicaChoice:
    """Choose the replica with the lowest cost: the time to compute or load the prompt there, and the time in the queue.

    If the demand for a prefix exceeds what the replicas that have it can serve, the other replicas are treated as if
    they had it. The least loaded one then computes the prefix, and is another home of the prefix from then on.

    Args:
        prompt: the prompt of the request.
        candidates: replicas that may get it, at least one. Their order does not matter.
        weights: weights of the cost.

    Returns:
        The choice. Equal arguments give the same choice.

    Complexity: O(candidates).
    """
    least_match_tokens = weights.least_match_tokens
    hit_tokens = [sum(each.hits) for each in candidates]
    useful_hits = [each.hits for each in candidates]
    for index, num_tokens in enumerate(hit_tokens):
        if num_tokens < least_match_tokens:
            hit_tokens[index] = 0
            useful_hits[index] = NO_HITS
    longest_tokens = max(hit_tokens)
    # A replica is a home of the prefix if its match is shorter than the longest one by less than the minimum match.
    num_homes = 0
    if longest_tokens:
        num_homes = sum(longest_tokens - num_tokens < least_match_tokens for num_tokens in hit_tokens)
    needs_new_home = bool(longest_tokens) and prompt.demand > num_homes * weights.home_share
    if needs_new_home:
        longest_hits = Hits(device=longest_tokens)
        useful_hits = [
            longest_hits if num_tokens < longest_tokens else hits
            for hits, num_tokens in zip(useful_hits, hit_tokens, strict=True)
        ]
    prompt_tokens = prompt.prompt_tokens
    queue_weight = weights.queue_weight
    balance = weights.balance
    costs = [
        times.seconds(prompt_tokens, hits) + queue_weight * ((queue_tokens + balance * recent_tokens) * times.compute_s)
        for hits, (_, _, queue_tokens, recent_tokens, times) in zip(useful_hits, candidates, strict=True)
    ]
    lowest_s = min(costs)
    slack_s = weights.slack_s
    equal_indices = [index for index, cost_s in enumerate(costs) if cost_s - lowest_s < slack_s]
    best_index = max(equal_indices, key=lambda index: (hit_tokens[index], _draw(prompt.key, candidates[index].name)))
    is_new_home = needs_new_home and hit_tokens[best_index] < longest_tokens
    return ReplicaChoice(best_index, candidates[best_index].hits, costs[best_index], is_new_home)


def make_routing(name: str, weights: RoutingWeights = DEFAULT_WEIGHTS) -> RoutingPolicy:
    """Return a routing policy.

    Args:
        name: one of `ROUTINGS`. `prefix` is `choose`. `longest-prefix` takes the replica with the longest cached
            prefix, and among equals the one with the shortest queue. `threshold` does so if that prefix is at least 0.3
            of the prompt, and otherwise takes the shortest queue. `least-loaded` always takes the shortest queue.
            `round-robin` and `random` ignore caches and queues.
        weights: weights of `prefix`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in ROUTINGS:
        raise ConfigError(f"routing: expected one of {', '.join(ROUTINGS)}, got {name}")
    return _MAKERS[name](weights)


def _make_round_robin() -> RoutingPolicy:
    turns = itertools.count()
    return lambda prompt, candidates: _choice_of(candidates, next(turns) % len(candidates))


def _make_random() -> RoutingPolicy:
    rng = random.Random(0)
    return lambda prompt, candidates: _choice_of(candidates, rng.randrange(len(candidates)))


def _choose_by_threshold(prompt: RoutedPrompt, candidates: Sequence[Candidate]) -> ReplicaChoice:
    choice = _choose_lowest(candidates, _longest_prefix_key)
    if choice.hits.total < _THRESHOLD_SHARE * prompt.prompt_tokens:
        return _choose_lowest(candidates, _load_key)
    return choice


def _longest_prefix_key(candidate: Candidate) -> tuple[float, ...]:
    return (-candidate.hits.total, *_load_key(candidate))


def _load_key(candidate: Candidate) -> tuple[float, float]:
    return candidate.queue_tokens, candidate.recent_tokens


def _choose_lowest(candidates: Sequence[Candidate], key: Callable[[Candidate], tuple[float, ...]]) -> ReplicaChoice:
    return _choice_of(candidates, min(range(len(candidates)), key=lambda index: key(candidates[index])))


def _choice_of(candidates: Sequence[Candidate], index: int) -> ReplicaChoice:
    return ReplicaChoice(index, candidates[index].hits, 0.0)


def _draw(key: int, name: str) -> int:
    """Draw a number for a prefix and a replica; the highest one wins, in every router (rendezvous hashing)."""
    return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"), seed=key & (2**64 - 1))


# By name: a function that makes the policy from the weights, which only `prefix` uses.
_MAKERS: dict[str, Callable[[RoutingWeights], RoutingPolicy]] = {
    PREFIX: lambda weights: lambda prompt, candidates: choose(prompt, candidates, weights),
    "threshold": lambda weights: _choose_by_threshold,
    "longest-prefix": lambda weights: lambda prompt, candidates: _choose_lowest(candidates, _longest_prefix_key),
    "least-loaded": lambda weights: lambda prompt, candidates: _choose_lowest(candidates, _load_key),
    "round-robin": lambda weights: _make_round_robin(),
    "random": lambda weights: _make_random(),
}
ROUTINGS = tuple(_MAKERS)
