"""Scripts of events for a simulated engine, written from seeds."""

from __future__ import annotations

import random
from typing import NamedTuple

from radixkv.api.retention import Retention
from radixkv.cache.tenants import Quota
from radixkv.config import EVICTION_POLICIES
from tests.engine.simulation.engine_events import (
    ANSWER,
    HOW_STEPS_FAIL,
    Ask,
    Cancel,
    Close,
    Event,
    Fail,
    Finish,
    Load,
    Prompt,
    Purge,
    Release,
    Retain,
    Unload,
    World,
    cut,
    length_of,
    max_tokens_of,
)
from tests.engine.simulation.invoking_script import invoking_events
from tests.engine.simulation.public_script import public_events, with_public_prefixes
from tests.engine.simulation.simulated_model import VOCAB_SIZE


def make_world(seed: int) -> World:
    """Make a small world, so that requests compete for blocks and share prefixes."""
    rng = random.Random(f"world {seed}")
    computes_once = seed % 8 == 0
    block_size = rng.choice((1, 2, 4, 4, 8))
    num_blocks = 4000 if computes_once else rng.choice((6, 9, 14, 24, 40, 120))
    quotas = []
    if not computes_once and rng.random() < 0.4:
        ceiling = rng.choice((None, rng.randint(num_blocks // 2, num_blocks)))
        floor = rng.choice((0, num_blocks // 4))
        quotas.append(("a", Quota(floor, ceiling, rng.choice((None, 1, 3)))))
        if rng.random() < 0.5:
            quotas.append(("b", Quota(rng.choice((0, num_blocks // 4)), rng.choice((None, num_blocks // 2)))))
    world = World(
        block_size=block_size,
        num_blocks=num_blocks,
        max_step_tokens=rng.choice((2, 5, 8, 16, 48, 200)),
        max_running_requests=rng.choice((1, 2, 4, 8, 20)),
        policy=rng.choice(EVICTION_POLICIES),
        max_retained_blocks=rng.choice((0, num_blocks // 5, num_blocks)),
        held_lease_ttl_s=rng.choice((3.0, 20.0, 60.0)),
        quotas=tuple(quotas),
        weights=rng.choice(((), (("a", 3.0),), (("b", 0.25), ("c", 2.0)))),
        token_s=rng.choice((0.0, 0.05, 0.5)),
        computes_once=computes_once,
        max_held_blocks=rng.choice((None, None, num_blocks // 2)),
    )
    return world if computes_once else with_public_prefixes(world, seed)


def make_script(world: World, seed: int) -> list[Event]:
    """Write the events of a seed in a world."""
    script = _Author(world, seed).write_script()
    script += invoking_events(world, seed, script)
    return [*script, *public_events(world, seed, script)]


class _EarlierPrompt(NamedTuple):
    """An earlier prompt, and the number of tokens of a greedy generation after it; 0 without such a generation."""

    prompt: Prompt
    num_generated: int


class _Author:
    """Writes scripts. The frequency of each kind of event differs from script to script."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(f"script {seed}")
        self._finish_random = random.Random(f"finishes {seed}")  # separate, so that older scripts stay the same
        self._prompts: list[tuple[str, str, _EarlierPrompt]] = []  # with tenant and salt
        self._num_stems = 0
        self._adapter_random = random.Random(f"adapters {seed}")  # separate for the same reason
        self._adapter_names: tuple[str, ...] = ()
        if not world.computes_once:
            self._adapter_names = self._adapter_random.choice(((), (), ("law",), ("law", "tax")))
        self._is_calm = world.computes_once or self._chance(0.2)  # nothing is cancelled or fails
        self._trouble_probability = self._random.choice((0.05, 0.15, 0.4))
        self._generation_probability = self._random.choice((0.0, 0.3, 0.7, 1.0))
        self._tenants = self._random.choice(("a", "ab", "abc"))
        self._salts = self._random.choice((("",), ("",), ("", "s")))
        self._max_piece_tokens = self._random.choice((5, 12, 30, 80, 200))
        self._max_new_tokens = self._random.choice((3, 10, 30))
        self._pace_s = self._random.choice((0.0, 0.3, 1.0, 3.0))
        self._max_requests = 40
        if self._chance(0.2):  # long answers, and seldom anything else: steps are started ahead
            self._generation_probability, self._max_new_tokens, self._pace_s, self._max_requests = 1.0, 60, 30.0, 12

    def write_script(self) -> list[Event]:
        now_s, pace_s = 0.0, self._pace_s
        events: list[Event] = [Load(0.0, name, self._choose_digest()) for name in self._adapter_names]
        for key in range(self._random.randint(4, self._max_requests)):
            now_s += self._random.choice((0.0, 2 * pace_s * self._random.random()))
            ask = self._make_ask(round(now_s, 2), key)
            events.append(ask)
            events += self._make_later_events(ask)
            events += self._make_adapter_events(ask)
        if not self._is_calm:
            events += [
                Fail(self._random.randrange(60), self._random.choice(HOW_STEPS_FAIL))
                for _ in range(self._random.choice((0, 0, 1, 3, 20)))
            ]
            if self._chance(0.15):
                events.append(Close(at_s=self._at(now_s + 20)))
        return events

    def _make_ask(self, at_s: float, key: int) -> Ask:
        rng, world = self._random, self._world
        tenant, salt, earlier = rng.choice(self._tenants), rng.choice(self._salts), _EarlierPrompt((), 0)
        if self._prompts and self._chance(0.8):
            earlier_tenant, earlier_salt, earlier = rng.choice(self._prompts[-8:])
            if world.computes_once or self._chance(0.8):
                tenant, salt = earlier_tenant, earlier_salt
        max_new_tokens = rng.randint(1, self._max_new_tokens) if self._chance(self._generation_probability) else 0
        max_tokens = max_tokens_of(world, tenant, generates=max_new_tokens > 0)
        max_new_tokens = min(max_new_tokens, max_tokens - 1)
        max_tokens -= max_new_tokens
        if world.computes_once:
            prompt = self._make_branching_prompt(earlier.prompt)
        else:
            prompt = self._make_prompt(earlier, max_tokens)
        is_greedy = self._chance(0.5)
        self._prompts.append((tenant, salt, _EarlierPrompt(prompt, max_new_tokens if is_greedy else 0)))
        trouble_probability = 0.0 if self._is_calm else self._trouble_probability
        return Ask(
            at_s,
            key,
            prompt,
            tenant,
            salt,
            urgency=rng.choice((50, 50, 50, 55, 100, 0)),
            reads=world.computes_once or self._chance(0.9),
            writes=world.computes_once or self._chance(0.9),
            retention=self._make_retention(length_of(prompt)) if self._chance(0.2) else None,
            holds=not max_new_tokens and not world.computes_once and self._chance(0.12),
            deadline_s=round(at_s + rng.uniform(0, 40), 2) if self._chance(trouble_probability / 2) else None,
            max_new_tokens=max_new_tokens,
            temperature=0.0 if is_greedy else rng.choice((0.5, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(100),
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 10)) if self._chance(0.2) else (),
            penalty=0.0 if is_greedy else float(key % 2),
            min_tokens=0 if is_greedy else min(max_new_tokens, key % 3),
            rises=0 if is_greedy or key % 5 < 3 else 10 + 10 * (key % 7),
            refuses_after=4 if key % 6 == 3 else 0,
            raises_at=rng.randint(1, 6) if self._chance(trouble_probability / 4) else 0,
            cancels_at=rng.randint(1, 6) if self._chance(trouble_probability / 4) else 0,
            finishes_at=self._choose_finish(trouble_probability / 2),
            adapter=self._adapter_random.choice(("", *self._adapter_names, *self._adapter_names)),
        )

    def _choose_finish(self, probability: float) -> int:
        return self._finish_random.randint(1, 6) if self._finish_random.random() < probability else 0

    def _make_later_events(self, ask: Ask) -> list[Event]:
        """Make events that follow a request, such as a release of its lease, its cancellation, or a purge."""
        rng, asked_s = self._random, ask.at_s
        events: list[Event] = []
        if ask.holds and self._chance(0.6):
            events.append(Release(self._at(asked_s, 40), ask.key))
        if self._world.computes_once:
            return events
        if self._chance(0.1):
            retention = self._make_retention(length_of(ask.prompt))
            events.append(Retain(self._at(asked_s, 20), ask.prompt, retention, ask.tenant, ask.salt))
        if self._is_calm:
            return events
        if ask.max_new_tokens and self._finish_random.random() < self._trouble_probability:
            at_s = round(asked_s + self._finish_random.choice((0, 5, 30)) * self._finish_random.random(), 2)
            events.append(Finish(at_s, ask.key, during_step=self._finish_random.random() < 0.6))
        if self._chance(self._trouble_probability):
            events.append(Cancel(self._at(asked_s, rng.choice((0, 5, 30))), ask.key, during_step=self._chance(0.6)))
        if self._chance(self._trouble_probability / 8):
            events.append(Purge(self._at(asked_s, 20), rng.choice((None, "a", "b")), rng.choice((None, None, "s"))))
        return events

    def _make_adapter_events(self, ask: Ask) -> list[Event]:
        """Remap or unload the name of an adapter after a request. The prompt is then sent again with this name."""
        rng = self._adapter_random
        if not self._adapter_names or rng.random() > 0.25:
            return []
        name, at_s = ask.adapter or rng.choice(self._adapter_names), round(ask.at_s + 20 * rng.random(), 2)
        repeated_s, key = round(at_s + 9 * rng.random(), 2), 1000 + ask.key
        repeated = Ask(repeated_s, key, ask.prompt, ask.tenant, ask.salt, adapter=name)
        if rng.random() < 0.3:
            return [Unload(at_s, name), Load(round(at_s + 5 * rng.random(), 2), name, self._choose_digest()), repeated]
        return [Load(at_s, name, self._choose_digest()), repeated]

    def _choose_digest(self) -> str:
        return self._adapter_random.choice(("one", "two", "three"))

    def _make_prompt(self, earlier: _EarlierPrompt, max_tokens: int) -> Prompt:
        """Make a prompt from an earlier one: equal, cut or continued by the answer; often new tokens follow."""
        rng, pieces = self._random, earlier.prompt
        if earlier.num_generated and self._chance(0.7):
            pieces = (*pieces, (ANSWER, rng.randint(1, earlier.num_generated)))
        elif self._chance(0.6):
            pieces = cut(pieces, rng.randint(0, length_of(pieces)))
        if not pieces or self._chance(0.7):
            pieces = (*pieces, (self._new_stem(), rng.randint(1, rng.choice((3, self._max_piece_tokens)))))
        return cut(pieces, max_tokens)

    def _make_branching_prompt(self, earlier: Prompt) -> Prompt:
        """Make a prompt of an earlier one's whole pieces, whole new blocks, and an end that no other prompt has."""
        rng = self._random
        shared_pieces = earlier[: rng.randrange(len(earlier))] if earlier else ()
        if not shared_pieces or self._chance(0.5):
            shared_pieces = (*shared_pieces, (self._new_stem(), self._world.block_size * rng.randint(1, 6)))
        return (*shared_pieces, (self._new_stem(), rng.randint(1, 9)))

    def _new_stem(self) -> int:
        self._num_stems += 1
        return self._num_stems

    def _make_retention(self, num_tokens: int) -> Retention:
        rng = self._random
        start = rng.choice((0, rng.randrange(num_tokens)))
        return Retention(rng.choice((0, 20, 50, 80, 100)), rng.choice((None, 1.0, 10.0)), start)

    def _at(self, now_s: float, within_s: float = 0.0) -> float:
        return round(now_s + within_s * self._random.random(), 2)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability
