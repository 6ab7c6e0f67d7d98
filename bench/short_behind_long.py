"""Measures how long short prompts wait if they arrive while a long prompt is computed.

    python -m bench.short_behind_long --json FILE

A short prompt should be answered within the duration of the step that was running when it arrived, plus the next step,
plus the time that it takes on an idle server. The benchmark detects the end of a step by Probe calls, which the engine
answers between two steps.

The exit status is 0 if every short prompt was answered in time, 1 if not, and 2 if the server did not start, or if the
long prompt ended before the first short one was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.errors import ConfigError
from radixkv.service.cli.argument_types import positive
from radixkv.service.client import AsyncClient

VOCAB_SIZE = 256
PROBE_TOKENS = 16
_NUM_ALONE = 9  # prompts on the idle server
SETTLE_S = 2.0  # the first steps of a long prompt are short, so waiting for them would show nothing


@dataclass(frozen=True, slots=True)
class DelaySample:
    """Times of one short prompt.

    Attributes:
        seconds: time to the answer.
        alone_s: median time to the answer of such a prompt on an idle server.
        two_steps_s: the maximum time of two successive steps, the first of which ran while the prompt waited or when
            it arrived.
    """

    seconds: float
    alone_s: float
    two_steps_s: float

    @property
    def ratio(self) -> float:
        """Time to the answer divided by the bound; should be at most 1."""
        return self.seconds / (self.two_steps_s + self.alone_s)


class StepWatch:
    """Records when steps end, by sending one probe after another."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._ends_s: list[float] = [time.monotonic()]
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await self._client.probe(list(range(PROBE_TOKENS)))
            self._ends_s.append(time.monotonic())

    def stop(self) -> None:
        """Stop sending probes."""
        self._task.cancel()

    def two_steps_s(self, start_s: float, end_s: float) -> float:
        """Return the maximum time of a step that overlaps `[start_s, end_s)` and the step after it, together."""
        ends_s = self._ends_s
        # Step i begins at ends_s[i - 1] and ends at ends_s[i].
        overlapping_steps = [i for i in range(1, len(ends_s)) if ends_s[i] > start_s and ends_s[i - 1] < end_s]
        last = len(ends_s) - 1
        return max(ends_s[min(i + 1, last)] - ends_s[i - 1] for i in overlapping_steps)


async def measure(address: str, long_tokens: int, short_tokens: int, count: int, seed: int) -> list[DelaySample]:
    """Send short prompts, one after another, while a long one is computed.

    Raises:
        ConfigError: the long prompt was answered before the first short one.
    """
    rng = random.Random(seed)

    def random_prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]

    async with AsyncClient(address, timeout_s=600) as client:
        alone_s = statistics.median([(await ask(client, random_prompt(short_tokens)))[1] for _ in range(_NUM_ALONE)])
        long_prefill = asyncio.create_task(
            client.prefill(random_prompt(long_tokens), read_cache=False, write_cache=False)
        )
        await asyncio.sleep(SETTLE_S)
        watch = StepWatch(client)
        timed_answers = []
        for _ in range(count):
            await asyncio.sleep(rng.random())
            start_s, seconds = await ask(client, random_prompt(short_tokens))
            if long_prefill.done():
                break
            timed_answers.append((start_s, seconds))
        if not timed_answers:
            watch.stop()
            await long_prefill
            raise ConfigError(
                f"--long-tokens: expected a prompt that is computed for longer than the first short one waits, got "
                f"{long_tokens} tokens, which were answered before it"
            )
        # The step after the last answer must end, too.
        await asyncio.sleep(2 * max(seconds for _, seconds in timed_answers))
        watch.stop()
        await long_prefill
    return [
        DelaySample(seconds, alone_s, watch.two_steps_s(start_s, start_s + seconds))
        for start_s, seconds in timed_answers
    ]


async def ask(client: AsyncClient, ids: list[int]) -> tuple[float, float]:
    """Send a prompt. Returns the time of `time.monotonic` before it was sent, and the seconds until the answer."""
    start_s = time.monotonic()
    answer = await client.prefill(ids)
    assert answer.usage.computed_tokens > 0, "the prompts are all different"
    return start_s, time.monotonic() - start_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure how long short prompts wait while a long one is computed.")
    parser.add_argument("--long-tokens", type=int, default=32_768)
    parser.add_argument("--short-tokens", type=int, default=64)
    parser.add_argument("--count", type=positive, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", metavar="tiny|DIR")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        with ServerProcess(serve_command(options.model, None, ())) as address:
            samples = asyncio.run(
                measure(address, options.long_tokens, options.short_tokens, options.count, options.seed)
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    waits_s = sorted(sample.seconds for sample in samples)
    result = {
        "short_requests": len(samples),
        "seconds": {"median": statistics.median(waits_s), "max": waits_s[-1]},
        "alone_s": samples[0].alone_s,
        "two_steps_s": {
            "median": statistics.median(sample.two_steps_s for sample in samples),
            "max": max(sample.two_steps_s for sample in samples),
        },
        "over_two_steps_and_alone": {
            "median": statistics.median(sample.ratio for sample in samples),
            "max": max(sample.ratio for sample in samples),
        },
    }
    print(
        f"{len(samples)} prompts of {options.short_tokens} tokens behind one of {options.long_tokens}: "
        f"{statistics.median(waits_s):.2f} s in the median, {waits_s[-1]:.2f} at most; over two steps and "
        f"{samples[0].alone_s:.2f} s alone: {result['over_two_steps_and_alone']}"
    )
    write_result(options.json, "bench.short_behind_long", arguments, result)
    return 0 if max(sample.ratio for sample in samples) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
