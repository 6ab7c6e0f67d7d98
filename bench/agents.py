"""Measures the turns of sessions after they have waited for a tool, and whether `radixkv simulate` predicts them.

    python -m bench.agents --json bench/results/agents.json

The steps of each round:

1. It plays sessions against three servers with a tier in host memory, one after the other. Each session sends a
   prompt, waits as for a tool, and sends the prompt with more tokens.
   - The control: the pool holds the tokens of all sessions, so each turn is a hit on the device. The TTFT (time to
     first token) of turns is compared with the median TTFT of these hits, by length. A turn is timely if its TTFT is at
     most 1.1 times that of a hit. The TTFT of hits varies too, so not all turns of the control are timely.
   - Without sessions: the pool holds half of the tokens, and the requests do not name their session.
   - With sessions: the pool is as small, but the requests name their session, so that the server loads blocks before a
     turn arrives.
2. The servers record their traffic. The benchmark simulates the traffic of the last server twice, and compares the
   predicted hit rate and median TTFT with those that the server had. The first simulation takes the times of prefills
   and loads from the same recording, as `radixkv simulate --time-model recorded` does; the second one takes them from
   the recording of the server without sessions.

The results are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.errors import ConfigError
from radixkv.planning.simulate import STOP, simulate
from radixkv.planning.tiers import TierCapacity
from radixkv.planning.time_model import TimeModel
from radixkv.planning.trace import TraceRequest, load_trace
from radixkv.service.cli.argument_types import positive, positive_number
from radixkv.service.client import AsyncClient, Awaits

BLOCK_SIZE = 64
_VOCAB_SIZE = 250
_NEW_TOKENS = 160  # of each turn
_MAX_TIMELY_RATIO = 1.1  # maximum ratio of a turn's TTFT to that of a hit, to count as timely
_CONTROL_POOL_SHARE = 1.5  # so that nothing is evicted
_CONTROL, _WITHOUT, _WITH = "control", "without sessions", "with sessions"
_PAUSE_S = 0.3  # before each measured request: a server that was idle is slower than one that has just answered


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn after the wait for a tool.

    Attributes:
        context_tokens: tokens of the session's previous prompt, with which the prompt of this turn begins.
        ttft_s: time to the first token.
        loaded_tokens: tokens that were loaded from the tier after the turn arrived.
        missed_tokens: tokens of the previous prompt that were computed again, without its last partial block.
    """

    context_tokens: int
    ttft_s: float
    loaded_tokens: int
    missed_tokens: int

    @property
    def is_ready(self) -> bool:
        """Whether the device had all blocks of the previous prompt."""
        return not self.loaded_tokens and not self.missed_tokens


class Prompts:
    """Random prompts, all of which differ in their first block."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._numbers = itertools.count(1)

    def new(self, num_tokens: int) -> list[int]:
        """Return a new prompt."""
        number = next(self._numbers)
        return [number % _VOCAB_SIZE, number // _VOCAB_SIZE, *self.more(num_tokens - 2)]

    def more(self, num_tokens: int) -> list[int]:
        """Return random tokens."""
        return self._rng.choices(range(_VOCAB_SIZE), k=num_tokens)


async def time_prefill(client: AsyncClient, tokens: list[int], **options: Any) -> tuple[float, Any]:
    """Pause, then send a prefill. Returns the seconds from the call to the answer, and the usage of the answer."""
    await asyncio.sleep(_PAUSE_S)
    start_s = time.perf_counter()
    answer = await client.prefill(tokens, **options)
    return time.perf_counter() - start_s, answer.usage


class Play:
    """Sessions that wait for tools.

    Args:
        client: client of the server.
        prompts: creates the prompts.
        names_sessions: whether requests name their session and what it waits for.
        wait_s: mean wait.

    Attributes:
        turns: the turns after waits.
        ttfts_s: time to the first token of all requests.
        cached_tokens, prompt_tokens: totals of all requests.
    """

    def __init__(
        self,
        client: AsyncClient,
        prompts: Prompts,
        *,
        names_sessions: bool,
        wait_s: float,
    ) -> None:
        self.turns: list[Turn] = []
        self.ttfts_s: list[float] = []
        self.cached_tokens = self.prompt_tokens = 0
        self._client = client
        self._prompts = prompts
        self._names_sessions = names_sessions
        self._wait_s = wait_s
        self._prefill_lock = asyncio.Lock()  # so that no prefill is slowed down by another one

    async def session(self, name: str, num_tokens: int, num_turns: int, start_s: float) -> None:
        """Play one session."""
        await asyncio.sleep(start_s)
        options: dict[str, Any] = {"session_id": name, "awaits": Awaits.TOOL} if self._names_sessions else {}
        tokens = self._prompts.new(num_tokens)
        await self._prefill(tokens, options)
        rng = random.Random(name)
        for _ in range(num_turns):
            await asyncio.sleep(rng.uniform(0.5, 1.5) * self._wait_s)
            next_prompt = tokens + self._prompts.more(_NEW_TOKENS)
            ttft_s, usage = await self._prefill(next_prompt, options)
            reusable_tokens = len(tokens) - len(tokens) % BLOCK_SIZE
            missed_tokens = max(0, reusable_tokens - usage.cached_tokens)
            self.turns.append(Turn(len(tokens), ttft_s, usage.host_tokens, missed_tokens))
            tokens = next_prompt

    async def _prefill(self, tokens: list[int], options: dict[str, Any]) -> tuple[float, Any]:
        async with self._prefill_lock:
            seconds, usage = await time_prefill(self._client, tokens, **options)
        self.ttfts_s.append(seconds)
        self.cached_tokens += usage.cached_tokens
        self.prompt_tokens += len(tokens)
        return seconds, usage


def ttft_of_hits(control: Play) -> dict[int, float]:
    """Return the median TTFT of the turns of a play by the number of tokens that they repeat.

    Raises:
        ConfigError: not everything that the turns repeat was on the device.
    """
    if not all(turn.is_ready for turn in control.turns):
        raise ConfigError("agents: the pool of the control does not hold all sessions")
    ttfts_s: dict[int, list[float]] = {}
    for turn in control.turns:
        ttfts_s.setdefault(turn.context_tokens, []).append(turn.ttft_s)
    return {length: statistics.median(samples) for length, samples in ttfts_s.items()}


def summarize(play: Play, hit_ttft_s: Mapping[int, float]) -> dict[str, Any]:
    """Return the numbers of a play.

    Args:
        play: the play.
        hit_ttft_s: the TTFT of hits on the device; see `ttft_of_hits`.
    """
    ratios = sorted(each.ttft_s / hit_ttft_s[each.context_tokens] for each in play.turns)
    return {
        "returns": len(play.turns),
        "ready_share": sum(each.is_ready for each in play.turns) / len(play.turns),
        "timely_share": sum(each <= _MAX_TIMELY_RATIO for each in ratios) / len(ratios),
        "ttft_over_hit": {"p50": statistics.median(ratios), "p95": ratios[int(0.95 * len(ratios))]},
        "loaded_tokens": sum(each.loaded_tokens for each in play.turns),
        "computed_again_tokens": sum(each.missed_tokens for each in play.turns),
        "hit_rate": play.cached_tokens / play.prompt_tokens,
        "ttft_p50_s": statistics.median(play.ttfts_s),
    }


def server_settings(options: argparse.Namespace, pool_share: float, record_path: Path) -> Iterator[str]:
    """Yield the settings of a server whose pool holds a share of the tokens of all sessions."""
    yield f"cache.capacity_tokens={pool_tokens(options, pool_share)}"
    yield f"cache.block_size={BLOCK_SIZE}"
    yield "cache.probation_share=1"
    yield f"tiers.host_bytes={options.host_bytes}"
    yield f"server.record_path={record_path}"


def pool_tokens(options: argparse.Namespace, pool_share: float) -> int:
    """Return the capacity in tokens of a pool that holds a share of the tokens of all sessions."""
    session_tokens = options.prompt_tokens + (options.turns + 1) * _NEW_TOKENS  # with room for one more turn
    return int(pool_share * options.sessions * session_tokens) // BLOCK_SIZE * BLOCK_SIZE


async def play_sessions(address: str, options: argparse.Namespace, *, names_sessions: bool) -> Play:
    """Play the sessions concurrently. Their starts are spread evenly over one mean wait."""
    async with AsyncClient(address, timeout_s=600) as client:
        play = Play(client, Prompts(2), names_sessions=names_sessions, wait_s=options.wait_s)
        sessions = [
            play.session(f"s{index}", options.prompt_tokens, options.turns, index * options.wait_s / options.sessions)
            for index in range(options.sessions)
        ]
        await asyncio.gather(*sessions)
        return play


def play_round(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Play the sessions against the three servers, and predict the last one. Traffic is recorded in `directory`."""
    result: dict[str, Any] = {}
    recorded: dict[str, list[TraceRequest]] = {}
    for name, pool_share, names_sessions in (
        (_CONTROL, _CONTROL_POOL_SHARE, True),
        (_WITHOUT, options.pool_share, False),
        (_WITH, options.pool_share, True),
    ):
        settings = tuple(server_settings(options, pool_share, directory / name))
        with ServerProcess(serve_command(options.model, None, settings)) as address:
            play = asyncio.run(play_sessions(address, options, names_sessions=names_sessions))
        recorded[name] = load_trace(directory / name)
        if name == _CONTROL:  # the first server, so that all others are compared with its hits
            hit_ttft_s = ttft_of_hits(play)
        measured_s = [each.measured.ttft_s for each in recorded[name] if each.measured is not None]
        result[name] = {**summarize(play, hit_ttft_s), "server_ttft_p50_s": statistics.median(measured_s)}
    for source in (_WITH, _WITHOUT):
        times = times_of(recorded[source])
        predicted = predict(recorded[_WITH], options, times)
        predicted["ttft_p50_over_measured"] = predicted["ttft_p50_s"] / result[_WITH]["server_ttft_p50_s"]
        result[f"predicted with the times of the server {source}"] = {"time_model": asdict(times), **predicted}
    return result


def medians_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median over the rounds of each number of each server and each prediction, without nested values."""
    return {
        name: {
            key: statistics.median(each[name][key] for each in rounds)
            for key, value in values.items()
            if isinstance(value, int | float)
        }
        for name, values in rounds[0].items()
    }


def times_of(requests: Sequence[TraceRequest]) -> TimeModel:
    """Return the times of prefills and loads that a server recorded."""
    return TimeModel.fit([each.measured for each in requests if each.measured is not None])


def predict(requests: Sequence[TraceRequest], options: argparse.Namespace, times: TimeModel) -> dict[str, Any]:
    """Simulate recorded traffic. Returns the predicted hit rate and latencies."""
    simulation = simulate(
        requests,
        policy="adaptive",
        capacity_tokens=pool_tokens(options, options.pool_share),
        block_size=BLOCK_SIZE,
        tiers=[TierCapacity("host", None)],
        hints=STOP,
        times=times,
    )
    assert simulation.latency is not None
    return {"hit_rate": simulation.token_hit_rate, **asdict(simulation.latency)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the results, write JSON. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure the turns of sessions after they have waited for a tool.")
    parser.add_argument("--model", metavar="tiny|DIR")
    parser.add_argument("--sessions", type=positive, default=16)
    parser.add_argument("--turns", type=positive, default=4)
    parser.add_argument("--rounds", type=positive, default=4)
    parser.add_argument("--prompt-tokens", type=positive, default=1600)
    parser.add_argument("--wait-s", type=positive_number, default=8.0, help="mean wait for a tool")
    parser.add_argument(
        "--pool-share",
        type=positive_number,
        default=0.5,
        help="size of the pool, as a share of the tokens of all sessions",
    )
    parser.add_argument(
        "--host-bytes", type=positive, default=1_000_000_000, help="size of the tier; all sessions should fit into it"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            rounds.append(play_round(options, Path(directory)))
        print(f"round {number + 1}: {rounds[-1]}")
    medians = medians_of(rounds)
    print(f"medians: {medians}")
    result = {"pool_tokens": pool_tokens(options, options.pool_share), "medians": medians, "rounds": rounds}
    write_result(options.json, "bench.agents", arguments, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
