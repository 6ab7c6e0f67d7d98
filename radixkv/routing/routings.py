"""Routings by name: the rule, and simpler ones to compare it with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from radixkv.errors import ConfigError
from radixkv.routing.candidate import Candidate
from radixkv.routing.rule import DEFAULT_RULE, Choice, Rule, Wish, choose

Routing = Callable[[Wish, Sequence[Candidate]], Choice]

PREFIX = "prefix"
ROUTINGS = (PREFIX, "threshold", "longest-prefix", "least-loaded", "round-robin", "random")
_THRESHOLD = 0.3  # the default of SGLang's gateway


def make_routing(name: str, rule: Rule = DEFAULT_RULE, seed: int = 0) -> Routing:
    """Make a routing.

    Args:
        name: one of `ROUTINGS`: `prefix` is the rule; `longest-prefix` goes where most is cached, to the shortest queue
            among equals; `threshold` does so if that is 0.3 of the prompt, and goes to the shortest queue otherwise;
            `least-loaded` goes there always; `round-robin` and `random` look at nothing.
        rule: weights of `prefix`.
        seed: of `random`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == PREFIX:
        return lambda wish, candidates: choose(wish, candidates, rule)
    if name == "threshold":
        return _threshold
    if name == "longest-prefix":
        return lambda wish, candidates: _best(candidates, _longest)
    if name == "least-loaded":
        return lambda wish, candidates: _best(candidates, _load)
    if name == "round-robin":
        turns = itertools.count()
        return lambda wish, candidates: _take(candidates, next(turns) % len(candidates))
    if name == "random":
        draw = random.Random(seed)
        return lambda wish, candidates: _take(candidates, draw.randrange(len(candidates)))
    raise ConfigError(f"routing: expected one of {', '.join(ROUTINGS)}, got {name}")


def _threshold(wish: Wish, candidates: Sequence[Candidate]) -> Choice:
    choice = _best(candidates, _longest)
    return choice if choice.hits.total >= _THRESHOLD * wish.prompt_tokens else _best(candidates, _load)


def _longest(candidate: Candidate) -> tuple[float, ...]:
    return (-candidate.hits.total, *_load(candidate))


def _load(candidate: Candidate) -> tuple[float, float]:
    return candidate.queue_tokens, candidate.recent_tokens


def _best(candidates: Sequence[Candidate], key: Callable[[Candidate], tuple[float, ...]]) -> Choice:
    return _take(candidates, min(range(len(candidates)), key=lambda index: key(candidates[index])))


def _take(candidates: Sequence[Candidate], index: int) -> Choice:
    return Choice(index, candidates[index].hits, 0.0)
