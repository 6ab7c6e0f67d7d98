"""Public prefixes in the scripts of a simulated engine: some prefixes of prompts are public for some time."""

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
    max_tokens_of,
    next_turn,
)

# Keys of requests and stems of pieces that only these scripts use. The key of a next turn is larger by a fixed number.
_FIRST_KEY, _NEXT_TURN_KEYS, _FIRST_STEM = 2000, 500, 500
_NAMES = ("p", "q", "r")


def with_public_prefixes(world: World, seed: int) -> World:
    """Give a world room for public prefixes, and tenants that opt out."""
    rng = random.Random(f"public world {seed}")
    quotas = dict(world.quotas)
    if rng.random() < 0.3:
        tenant = rng.choice("abc")
        quotas[tenant] = dataclasses.replace(quotas.get(tenant, Quota()), uses_public_prefixes=False)
    max_public_blocks = rng.choice((0, world.num_blocks // 4, world.num_blocks // 2))
    return dataclasses.replace(world, quotas=tuple(quotas.items()), max_public_blocks=max_public_blocks)


def public_events(world: World, seed: int, script: Sequence[Event]) -> list[Event]:
    """Write the events of operators during a script, and requests with prompts that share the public prefixes."""
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
            following_s = round(at_s + rng.choice((3, 30)) * rng.random(), 2)
            following = _make_following_ask(world, rng, Ask(following_s, key, prefix, adapter=adapter))
            events.append(following)
            if following.max_new_tokens:
                events.append(next_turn(world, rng, following, key + _NEXT_TURN_KEYS, _FIRST_STEM + 2))
    return events


def _make_following_ask(world: World, rng: random.Random, ask: Ask) -> Ask:
    """Make a request of any tenant whose prompt shares all or some tokens of a public prefix."""
    tenant, max_new_tokens = rng.choice("abc"), rng.choice((0, 0, 3, 12))
    max_tokens = max_tokens_of(world, tenant, generates=max_new_tokens > 0)
    max_new_tokens = min(max_new_tokens, max_tokens - 1)
    num_shared_tokens = length_of(ask.prompt) if rng.random() < 0.6 else rng.randint(0, length_of(ask.prompt))
    prompt: Prompt = cut(ask.prompt, num_shared_tokens)
    if not prompt or rng.random() < 0.7:  # from one of two stems, which several prompts share
        prompt = (*prompt, (_FIRST_STEM + rng.randrange(2), rng.randint(1, 20)))
    return dataclasses.replace(
        ask,
        prompt=cut(prompt, max_tokens - max_new_tokens),
        tenant=tenant,
        salt=rng.choice(("", "", "s")),
        max_new_tokens=max_new_tokens,
        holds=not max_new_tokens and rng.random() < 0.3,
        adapter=rng.choice((ask.adapter, "")),
    )
