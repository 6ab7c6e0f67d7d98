"""Simulates the whole engine in virtual time: a walk runs a script of events, and an oracle checks every step.

python -m tests.engine.simulation.engine_walk --seeds 2000 --seed 0
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.cache.walk.cache_walk import shortest_failing
from tests.engine.simulation.engine_events import HOW_STEPS_FAIL, Close, Event, Fail, World
from tests.engine.simulation.engine_script import make_script, make_world
from tests.engine.simulation.simulated_engine import SimulatedEngine

# One of this many seeds is also run with a failure at each of its steps in turn, unless it has more steps than this.
_FAILURE_SEED_INTERVAL = 50
_FAILURE_MAX_STEPS = 50


def walk(world: World, events: Iterable[Event]) -> Counter[str]:
    """Take one walk and return what happened on it."""
    return SimulatedEngine(world, events).run()


def walk_seed(seed: int) -> Counter[str]:
    """Take the walk of a seed."""
    world = make_world(seed)
    return walk(world, make_script(world, seed))


def scripts_with_failures(seed: int) -> tuple[World, list[list[Event]]]:
    """Make the world of a seed, and scripts in which one step fails in one way, or the engine closes after one step."""
    world = dataclasses.replace(make_world(seed), computes_once=False)
    script = [event for event in make_script(world, seed) if not isinstance(event, Fail | Close)]
    steps = range(walk(world, script)["steps"])
    failures: list[Event] = [Fail(step, how) for step in steps for how in HOW_STEPS_FAIL]
    failures += [Close(step=step + 1) for step in steps]
    return world, [[*script, failure] for failure in failures]


def failure_of(world: World, events: Iterable[Event]) -> str:
    """Take a walk, and return the error that it fails with; empty if it passes."""
    try:
        walk(world, events)
    except Exception as error:  # noqa: BLE001 - any exception of the engine or the oracle is a failure
        return f"{type(error).__name__}: {error}"
    return ""


def shortest(world: World, events: Sequence[Event]) -> list[Event]:
    """Remove events, and then reset fields of the others to defaults, as long as the walk fails in the same way."""
    failure = failure_of(world, events)

    def is_failing(script: list[Event]) -> bool:
        return failure_of(world, script) == failure

    needed = shortest_failing(lambda indices: is_failing([events[i] for i in indices]), list(range(len(events))))
    script = [events[i] for i in needed]
    for i, event in enumerate(script):
        for field in dataclasses.fields(event):
            if field.default not in (dataclasses.MISSING, getattr(event, field.name)):
                plainer = dataclasses.replace(script[i], **{field.name: field.default})
                if is_failing([*script[:i], plainer, *script[i + 1 :]]):
                    script[i] = plainer
    return script


def report(world: World, events: Sequence[Event]) -> str:
    """Describe a shortened failing walk as code that can be pasted into a test."""
    script = shortest(world, events)
    lines = "".join(f"        {event},\n" for event in script)
    return f"walk(\n    {world},\n    [\n{lines}    ],\n)\n  fails with {failure_of(world, script)}"


def walk_or_report(world: World, script: Sequence[Event]) -> Counter[str]:
    """Take one walk and return what happened on it. If it fails, it is shortened.

    Raises:
        AssertionError: it failed; the message can be pasted into a test.
    """
    try:
        return walk(world, script)
    except Exception as error:
        raise AssertionError(report(world, script)) from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate the engine in seeded worlds until a walk fails.")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # steps fail on purpose
    events, start_s = Counter[str](), time.perf_counter()
    for seed in range(options.seed, options.seed + options.seeds):
        world = make_world(seed)
        seed_events = walk_or_report(world, make_script(world, seed))
        events += seed_events
        events["engines"] += 1
        if seed % _FAILURE_SEED_INTERVAL == 1 and seed_events["steps"] <= _FAILURE_MAX_STEPS:
            world, scripts = scripts_with_failures(seed)
            for script in scripts:
                events += walk_or_report(world, script)
                events["engines"] += 1
    elapsed_s = time.perf_counter() - start_s
    print(f"{options.seeds} seeds in {elapsed_s:.0f} s, {events['steps'] / elapsed_s:.0f} steps/s")
    print("\n".join(f"{count:9d} {event}" for event, count in sorted(events.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
