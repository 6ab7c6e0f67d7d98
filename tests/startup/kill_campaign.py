"""Kills engines that use the same disk at random moments, one after the other, and compares every answer.

    python -m tests.startup.kill_campaign --kills 1000

Each life is a process of its own, forked from a process that has loaded all code and computed nothing. A life must
start on the disk that the life before it left, and serve. Exit status: 0 if no answer was different, no life failed or
leaked anything, and blocks were loaded from the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.startup.life import Case, Pipe, live, prepare, read_cases

# Moments of a kill, each with the report line after which it begins and the line with which it ends.
MOMENTS = {
    "at once": ("", ""),
    "start": ("", "ready"),
    "reading the disk": ("opened", "found"),
    "serving": ("ready", "served"),
    "a purge, or the check after it": ("served", "checked"),
    "stop": ("checked", "stopped"),
}
WHOLE_SHARE = 0.08  # of lives, which are not killed
NUM_REQUESTS = 40  # per life
_DEFAULT_MOMENT_S = 0.03  # duration of a moment that was not measured
_REPORT_KILLS = 100  # kills after which the progress is printed


@dataclass
class Report:
    """Counts over all lives."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)  # by moment
    lives: int = 0
    whole_lives: int = 0  # not killed
    checked_lives: int = 0
    failed_lives: int = 0
    restarts_after_a_kill_that_served: int = 0
    answers: int = 0
    different: int = 0
    answers_with_disk_blocks: int = 0
    answers_with_host_blocks: int = 0
    disk_tokens: int = 0
    host_tokens: int = 0
    blocks_found_by_restarts: int = 0
    blocks_found_without_owner: int = 0
    purges_that_held: int = 0  # the next life found none of the purged tokens
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether all answers were right, no life failed, and tokens were loaded from the disk."""
        return not self.different and not self.failed_lives and self.disk_tokens > 0


class Child:
    """A process that was forked to run a function.

    Args:
        run: the function.
    """

    def __init__(self, run: Callable[[Pipe], None]) -> None:
        self._reader, writer = os.pipe()
        self.started_s = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._reader)
            os._exit(_run_in_child(run, Pipe(writer)))
        os.close(writer)
        self._incomplete_line = b""

    def read(self, until_s: float) -> list[list[str]] | None:
        """Return the words of the next lines; an empty list if none arrives until `until_s`, None after the end."""
        if not select.select([self._reader], [], [], max(0.0, until_s - time.monotonic()))[0]:
            return []
        data = os.read(self._reader, 1 << 16)
        if not data:
            return None
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        return [line.decode().split() for line in lines]

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for the end of the process. Returns its exit status, or minus the signal that killed it."""
        status = os.waitpid(self.pid, 0)[1]
        os.close(self._reader)
        return os.waitstatus_to_exitcode(status)


@dataclass
class Life:
    """What a process has reported so far.

    Attributes:
        started_s: time of its start, by `time.monotonic()`.
        moment: the moment at which it is to be killed, a key of `MOMENTS`; "" for none.
        seen_s: the times of the last line that begins with each word; under "", the start.
    """

    started_s: float
    moment: str = ""
    num_answers: int = 0
    seen_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen_s[""] = self.started_s


class Campaign:
    """Lives in one folder, one after the other.

    Args:
        folder: holds the checkpoint, the cases, and the disk of all lives.
        seed: seed of all random choices.

    Attributes:
        report: counts over all lives so far.
        cases: requests and their answers; `run` prepares them.
        purged: indices in `CALLERS` of the callers of whom nothing may be cached.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.report = Report(seed)
        self._folder, self._seed = folder, seed
        self._random = random.Random(seed)
        self.cases: list[Case] = []
        self._durations_s: dict[str, list[float]] = defaultdict(list)  # of each moment, in lives that were not killed
        self.purged: set[int] = set()
        self._is_after_kill = False

    def run(self, num_kills: int) -> None:
        """Prepare, start and kill lives, and end with one that is not killed."""
        start_s = time.monotonic()
        child = Child(lambda _: prepare(self._folder, self._seed))
        assert child.end() == 0, "expected a process that answers all cases alone, got one that failed"
        self.cases = read_cases(self._folder)
        self._run_life("")
        while sum(self.report.kills.values()) < num_kills and self.report.failed_lives < 10:
            is_whole = self._random.random() < WHOLE_SHARE
            self._run_life("" if is_whole else self._random.choice(list(MOMENTS)))
        self._run_life("")
        self.report.seconds = time.monotonic() - start_s

    def _run_life(self, moment: str) -> None:
        """Run a life, and kill it at a random time within a moment; "" for not at all."""
        self.report.lives += 1
        seed = self._seed * 1_000_003 + self.report.lives
        child = Child(functools.partial(live, self._folder, self.cases, NUM_REQUESTS, set(self.purged), seed))
        life = Life(child.started_s, moment)
        until_s = child.started_s + PATIENCE_S
        if moment and not MOMENTS[moment][0]:
            until_s = child.started_s + self._delay_s(moment)
        while (lines := child.read(until_s)) is not None:
            for line in lines:
                self.note(life, line)
                if moment and line[0] == MOMENTS[moment][0]:
                    until_s = time.monotonic() + self._delay_s(moment)
            if time.monotonic() >= until_s:
                child.kill()
        self.end(life, child.end())

    def _delay_s(self, moment: str) -> float:
        """Draw the seconds from the beginning of a moment to the kill."""
        usual_s = statistics.median(self._durations_s[moment]) if self._durations_s[moment] else _DEFAULT_MOMENT_S
        return self._random.uniform(0.0, 0.9 * usual_s)

    def note(self, life: Life, line: list[str]) -> None:
        """Count a line that a life reports."""
        report, word = self.report, line[0]
        life.seen_s[word] = time.monotonic()
        if word == "answer":
            number, digest, host_tokens, disk_tokens = int(line[1]), line[2], int(line[3]), int(line[4])
            life.num_answers += 1
            report.answers += 1
            report.different += digest != self.cases[number].digest
            report.answers_with_host_blocks += host_tokens > 0
            report.answers_with_disk_blocks += disk_tokens > 0
            report.host_tokens += host_tokens
            report.disk_tokens += disk_tokens
        elif word == "found":
            report.blocks_found_by_restarts += int(line[1])
            report.blocks_found_without_owner += int(line[2])
        elif word == "purged":
            self.purged.add(int(line[1]))
        elif word == "verified":
            self.purged.discard(int(line[1]))
            report.purges_that_held += 1
        elif word == "checked":
            report.checked_lives += 1

    def end(self, life: Life, status: int) -> None:
        """Count how a life ended: killed as planned, by itself, or in any other way, which is a failure.

        A life that ended before its planned kill counts as whole.
        """
        report = self.report
        report.restarts_after_a_kill_that_served += self._is_after_kill and life.num_answers > 0
        is_killed, is_whole = status == -signal.SIGKILL and life.moment != "", status == 0
        if is_killed:
            report.kills[life.moment] += 1
            if (num_kills := sum(report.kills.values())) % _REPORT_KILLS == 0:
                print(f"{num_kills} kills, {report.answers} answers, {report.different} different", file=sys.stderr)
        elif is_whole:
            report.whole_lives += 1
            for moment, (first_word, last_word) in MOMENTS.items():
                if last_word:
                    self._durations_s[moment].append(life.seen_s[last_word] - life.seen_s[first_word])
        else:
            report.failed_lives += 1
            print(f"life {report.lives} ended with {status} after {list(life.seen_s)[-1]!r}", file=sys.stderr)
        self._is_after_kill = is_killed


def _run_in_child(run: Callable[[Pipe], None], pipe: Pipe) -> int:
    """Run a function in the child. Returns the exit status of the child."""
    try:
        run(pipe)
    except BaseException:  # noqa: BLE001 - the child must never run the code of the parent
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.startup.kill_campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # the report has counts in place of log lines
    importlib.import_module("transformers.models.llama.modeling_llama")  # once, and not in each life
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), args.seed)
        campaign.run(args.kills)
    result = {**asdict(campaign.report), "kills": dict(campaign.report.kills)}
    result["num_kills"] = sum(result["kills"].values())
    for name, value in result.items():
        print(f"{name:36} {value}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if campaign.report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
