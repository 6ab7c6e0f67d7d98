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
        prompts = [prefix + ids for ids in self._random(seed, self.num_prompts, self.own_tokens)]
        tasks = [Task(prompts, self.new_tokens, self.at_once, self.shared_tokens)]
        if self.unit == "token":  # the CPU time of the prompt is measured with another prompt of the same length
            other = [prefix + ids for ids in self._random(f"{seed} first", self.num_prompts, self.own_tokens)]
            tasks.insert(0, Task(other, 1, self.at_once, self.shared_tokens))
        return tasks

    def filling_task(self) -> Task | None:
        """Build the task that puts the shared prefix into the cache; None if there is none."""
        if not self.shared_tokens:
            return None
        [own] = self._random("fill", 1, self.own_tokens)
        return Task([self._prefix() + own], 1, 1, self.shared_tokens, fills_cache=True)

    def measure(self, ask: Ask, seed: str) -> PeerSample:
        """Send the prompts of one repetition, and divide the time by the number of units."""
        measured = [ask(task) for task in self.tasks(seed)]
        last = measured[-1]
        wall_s, cpu_s, units = last.done.wall_s, last.cpu_s, self.num_prompts
        if self.unit == "token":
            wall_s -= sum(last.done.first_s)
            cpu_s = max(0.0, cpu_s - measured[0].cpu_s)
            units = self.num_prompts * (self.new_tokens - 1)
        elif self.unit == "batch":
            units = 1
        cached = [each for each in last.done.cached_tokens if each is not None]
        first_tokens = tuple(ids[0] for each in measured for ids in each.done.token_ids)
        return PeerSample(wall_s / units, cpu_s / units, first_tokens, sum(cached) if cached else None)

    def _prefix(self) -> list[int]:
        return self._random("prefix", 1, self.shared_tokens)[0] if self.shared_tokens else []

    def _random(self, seed: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
        digest = hashlib.sha256(f"{self.model} {self.shared_tokens} {num_tokens} {seed}".encode()).digest()
        low, high = _IDS[self.model]
        numbers = np.random.default_rng(int.from_bytes(digest[:8])).integers(low, high, (num_prompts, num_tokens))
        rows: list[list[int]] = numbers.tolist()
        return rows


def build_rows(*, is_quick: bool = False) -> dict[str, PeerRow]:
    """Build all rows by name. Quick ones have fewer prompts and tokens, and are only a smoke test."""
    few = 4 if is_quick else 1
    prefix, long_prefix, many, new, calls = 2048 // few, 8192 // few, 16 // few, 64 // few, 120 // few
    suffix = SUFFIX_TOKENS
    rows = {
        "start": PeerRow("start, until prompts are accepted", "start", "llama", 0, 0, 0, 0, 0),
        "cold": PeerRow("first token, nothing cached", "request", "llama", 0, prefix + suffix, 1, 1, 1),
        "warm": PeerRow(f"first token, {prefix:,} cached", "request", "llama", prefix, suffix, 4, 1, 1),
        "decode": PeerRow("decode, one request", "token", "llama", prefix, suffix, 1, 1, new + 1),
    }
    for name, shared in (("shared", prefix), ("shared-long", long_prefix)):
        title = f"{many} at once, {shared:,} shared, {suffix} + {new} each"
        rows[name] = PeerRow(title, "batch", "llama", shared, suffix, many, many, new)
    for at_once in (1, 4, 16):
        title = f"demo, {prefix:,} shared, {at_once} at once"
        rows[f"demo-{at_once}"] = PeerRow(title, "call", "tiny", prefix, suffix, calls, at_once, 1)
    title = "demo, nothing shared, 4 at once"
    rows["demo-cold"] = PeerRow(title, "call", "tiny", 0, prefix + suffix, calls // 5, 4, 1)
    return rows
