"""Rows of the comparison: the requests of each row, and the measurement of one unit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.parts.peers.worker_process import PeerMeasurement
from bench.parts.peers.workers.task import Task

SUFFIX_TOKENS = 64
_IDS = {"llama": (300, 31_999), "tiny": (0, 250)}  # ids that are ordinary tokens in every engine's vocabulary

Ask = Callable[[Task], PeerMeasurement]


@dataclass(frozen=True, slots=True)
class PeerSample:
    """One measurement of a row, for one unit of it: a start, a request, a token, a batch or a call.

    Attributes:
        cpu_s: CPU seconds of the processes of the engine and its client.
        first_tokens: first token of each prompt.
        cached_tokens: prompt tokens reused in total; None if the engine does not report it.
    """

    wall_s: float
    cpu_s: float
    first_tokens: tuple[int, ...]
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A row of the comparison.

    Attributes:
        title: shown in the table.
        unit: what one sample measures: start (without prompts), request, token, batch or call.
        model: llama or tiny.
        shared_tokens: prefix that all prompts share and that is cached before; 0 for prompts that share nothing.
        own_tokens: tokens of each prompt after the prefix.
        num_prompts: prompts of one repetition.
        at_once: requests in flight.
        new_tokens: tokens that are generated after each prompt.
    """

    title: str
    unit: str
    model: str
    shared_tokens: int
    own_tokens: int
    num_prompts: int
    at_once: int
    new_tokens: int

    def tasks(self, seed: str) -> list[Task]:
        """Build the tasks of one repetition, of which the last one is measured. Equal seeds give equal prompts."""
        prefix = self._prefix()
        prompts = [prefix + ids for ids in self._random_ids(seed, self.num_prompts, self.own_tokens)]
        tasks = [Task(prompts, self.new_tokens, self.at_once, self.shared_tokens)]
        if self.unit == "token":  # the CPU time of the prompt is measured with another prompt of the same length
            other_prompts = [
                prefix + ids for ids in self._random_ids(f"{seed} first", self.num_prompts, self.own_tokens)
            ]
            tasks.insert(0, Task(other_prompts, 1, self.at_once, self.shared_tokens))
        return tasks

    def filling_task(self) -> Task | None:
        """Build the task that puts the shared prefix into the cache; None if there is none."""
        if not self.shared_tokens:
            return None
        [own] = self._random_ids("fill", 1, self.own_tokens)
        return Task([self._prefix() + own], 1, 1, self.shared_tokens, fills_cache=True)

    def measure(self, ask: Ask, seed: str) -> PeerSample:
        """Send the prompts of one repetition, and divide the time by the number of units.

        For the unit `token`, the time to the first token is subtracted before.
        """
        measurements = [ask(task) for task in self.tasks(seed)]
        last = measurements[-1]
        wall_s, cpu_s, num_units = last.done.wall_s, last.cpu_s, self.num_prompts
        if self.unit == "token":
            wall_s -= sum(last.done.first_s)
            cpu_s = max(0.0, cpu_s - measurements[0].cpu_s)
            num_units = self.num_prompts * (self.new_tokens - 1)
        elif self.unit == "batch":
            num_units = 1
        cached = [each for each in last.done.cached_tokens if each is not None]
        first_tokens = tuple(ids[0] for each in measurements for ids in each.done.token_ids)
        return PeerSample(wall_s / num_units, cpu_s / num_units, first_tokens, sum(cached) if cached else None)

    def _prefix(self) -> list[int]:
        return self._random_ids("prefix", 1, self.shared_tokens)[0] if self.shared_tokens else []

    def _random_ids(self, seed: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
        digest = hashlib.sha256(f"{self.model} {self.shared_tokens} {num_tokens} {seed}".encode()).digest()
        low, high = _IDS[self.model]
        numbers = np.random.default_rng(int.from_bytes(digest[:8])).integers(low, high, (num_prompts, num_tokens))
        token_ids: list[list[int]] = numbers.tolist()
        return token_ids


def build_rows(*, is_quick: bool = False) -> dict[str, PeerRow]:
    """Build all rows by name. Quick ones have fewer prompts and tokens, and are only a smoke test."""
    divisor = 4 if is_quick else 1
    prefix, long_prefix, new_tokens = 2048 // divisor, 8192 // divisor, 64 // divisor
    num_concurrent, num_calls = 16 // divisor, 120 // divisor
    suffix = SUFFIX_TOKENS
    # Title, unit, model, shared_tokens, own_tokens, num_prompts, at_once, new_tokens.
    rows = {
        "start": PeerRow("start, until prompts are accepted", "start", "llama", 0, 0, 0, 0, 0),
        "cold": PeerRow("first token, nothing cached", "request", "llama", 0, prefix + suffix, 1, 1, 1),
        "warm": PeerRow(f"first token, {prefix:,} cached", "request", "llama", prefix, suffix, 4, 1, 1),
        "decode": PeerRow("decode, one request", "token", "llama", prefix, suffix, 1, 1, new_tokens + 1),
    }
    for name, shared_tokens in (("shared", prefix), ("shared-long", long_prefix)):
        title = f"{num_concurrent} at once, {shared_tokens:,} shared, {suffix} + {new_tokens} each"
        rows[name] = PeerRow(title, "batch", "llama", shared_tokens, suffix, num_concurrent, num_concurrent, new_tokens)
    for at_once in (1, 4, 16):
        title = f"demo, {prefix:,} shared, {at_once} at once"
        rows[f"demo-{at_once}"] = PeerRow(title, "call", "tiny", prefix, suffix, num_calls, at_once, 1)
    title = "demo, nothing shared, 4 at once"
    rows["demo-cold"] = PeerRow(title, "call", "tiny", 0, prefix + suffix, num_calls // 5, 4, 1)
    return rows
