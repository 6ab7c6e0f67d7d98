"""Invoked adapters in the scripts of a simulated engine: names of such adapters, and prompts that invoke them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.engine.simulation.engine_events import (
    ANSWER,
    Ask,
    Event,
    Load,
    Unload,
    World,
    cut,
    max_tokens_of,
    next_turn,
)

# Keys of requests and stems of pieces that only these scripts use. The key of a next turn is larger by a fixed number.
_FIRST_KEY, _NEXT_TURN_KEYS, _FIRST_STEM = 3000, 500, 600


def invoking_events(world: World, seed: int, script: Sequence[Event]) -> list[Event]:
    """Repeat requests of a script with adapters that one of their tokens invokes, and remap or unload the adapters."""
    rng = random.Random(f"invoking script {seed}")
    asks = [event for event in script if isinstance(event, Ask)]
    if world.computes_once or rng.random() < 0.5:
        return []
    stem, length = rng.choice([piece for ask in asks for piece in ask.prompt if piece[0] != ANSWER])
    invocation = 1000 * stem + rng.randrange(length)
    asks = [ask for ask in asks if any(piece[0] == stem for piece in ask.prompt)]
    events: list[Event] = [Load(0.0, name, f"{name}+{invocation}") for name in ("helper", "guard")]
    for number in range(rng.randint(2, 8)):
        ask = _make_invoking_ask(world, rng, rng.choice(asks), _FIRST_KEY + number)
        events.append(ask)
        if ask.max_new_tokens:
            events.append(next_turn(world, rng, ask, ask.key + _NEXT_TURN_KEYS, rng.choice((stem, _FIRST_STEM))))
        if rng.random() < 0.2:
            name, at_s = rng.choice(("helper", "guard")), round(ask.at_s + 9 * rng.random(), 2)
            events.append(Unload(at_s, name) if rng.random() < 0.3 else Load(at_s, name, f"new+{invocation}"))
    return events


def _make_invoking_ask(world: World, rng: random.Random, original: Ask, key: int) -> Ask:
    """Make a request of the same tenant whose prompt begins like another one's."""
    prompt = original.prompt
    if rng.random() >= 0.6:
        prompt = (*prompt, (_FIRST_STEM + 1 + rng.randrange(2), rng.randint(1, 9)))
    max_new_tokens = rng.choice((0, 0, 4, 12))
    max_tokens = max_tokens_of(world, original.tenant, generates=max_new_tokens > 0)
    max_new_tokens = min(max_new_tokens, max_tokens - 1)
    return Ask(
        round(original.at_s + rng.choice((1, 20)) * rng.random(), 2),
        key,
        cut(prompt, max_tokens - max_new_tokens),
        original.tenant,
        original.salt,
        holds=not max_new_tokens and rng.random() < 0.2,
        max_new_tokens=max_new_tokens,
        adapter=rng.choice(("helper", "helper", "guard", "")),
    )
