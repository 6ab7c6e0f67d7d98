"""Public prefixes in the scripts of a simulated engine: prefixes of later prompts, public for some time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from radixkv.cache.tenants import Quota
from tests.engine.simulation.engine_events import (
    Ask,
    Event,
    Load,
    Prompt,
    Register,
    Unregister,
    World,
    cut,
    length_of,
    most_tokens_of,
    next_turn,
)

_FIRST_KEY, _FIRST_STEM = 2000, 500  # of requests and pieces that only these scripts have
_NUM_TURNS = 500  # of a script at most
_NAMES = ("p", "q", "r")


def with_public_prefixes(world: World, seed: int) -> World:
    """Give a world room for public prefixes, and tenants that opt out."""
    rng = random.Random(f"public world {seed}")
    quotas = dict(world.quotas)
    if rng.random() < 0.3:
        shy = rng.choice("abc")
        quotas[shy] = dataclasses.replace(quotas.get(shy, Quota()), uses_public_prefixes=False)
    max_public_blocks = rng.choice((0, world.num_blocks // 4, world.num_blocks // 2))
    return dataclasses.replace(world, quotas=tuple(quotas.items()), max_public_blocks=max_public_blocks)


def public_events(world: World, seed: int, script: Sequence[Event]) -> list[Event]:
    """Write what operators do in the course of a script, and prompts that follow."""
    rng = random.Random(f"public script {seed}")
    asks = [event for event in script if isinstance(event, Ask)]
    if world.computes_once or rng.random() < 0.3:
        return []
    adapters = ["", *{event.name for event in script if isinstance(event, Load)}]
    adapters.sort()
    events: list[Event] = []
    for _ in range(rng.randint(1, 6)):
        ask, name, adapter = rng.choice(asks), rng.choice(_NAMES), rng.choice(adapters)
        at_s = rng.choice((0.0, round(ask.at_s * rng.random(), 2)))
        prefix = cut(ask.prompt, rng.randint(1, length_of(ask.prompt)))
        events.append(Register(at_s, name, prefix, adapter))
        if rng.random() < 0.6:
            events.append(Unregister(round(at_s + rng.choice((0.5, 10, 60)) * rng.random(), 2), name))
        for _ in range(rng.randint(1, 5)):
            key = _FIRST_KEY + len(events)
            follows_s = round(at_s + rng.choice((3, 30)) * rng.random(), 2)
            following = _following(world, rng, Ask(follows_s, key, prefix, adapter=adapter))
            events.append(following)
            if following.max_new_tokens:
                events.append(next_turn(world, rng, following, key + _NUM_TURNS, _FIRST_STEM + 2))
    return events


def _following(world: World, rng: random.Random, ask: Ask) -> Ask:
    """Make the request of any tenant for a prompt that shares more or less with a prefix."""
    tenant, max_new_tokens = rng.choice("abc"), rng.choice((0, 0, 3, 12))
    most_tokens = most_tokens_of(world, tenant, generates=max_new_tokens > 0)
    max_new_tokens = min(max_new_tokens, most_tokens - 1)
    shared = length_of(ask.prompt) if rng.random() < 0.6 else rng.randint(0, length_of(ask.prompt))
    prompt: Prompt = cut(ask.prompt, shared)
    if not prompt or rng.random() < 0.7:  # of a few stems, so that those that follow share what they add, too
        prompt = (*prompt, (_FIRST_STEM + rng.randrange(2), rng.randint(1, 20)))
    return dataclasses.replace(
        ask,
        prompt=cut(prompt, most_tokens - max_new_tokens),
        tenant=tenant,
        salt=rng.choice(("", "", "s")),
        max_new_tokens=max_new_tokens,
        holds=not max_new_tokens and rng.random() < 0.3,
        adapter=rng.choice((ask.adapter, "")),
    )
