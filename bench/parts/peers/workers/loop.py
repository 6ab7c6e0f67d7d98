"""The loop of a worker: an engine runs tasks that arrive as lines on stdin, until stdin ends."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.parts.peers.workers.task import Done, Ready, Task, to_line


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Command line of a worker.

    Attributes:
        model: the checkpoint as the engine reads it, a directory or a file.
        dtype: float32 or bfloat16, for weights, matmuls and K/V; `auto` for what the engine chooses for the model.
        threads: number of compute threads.
        mode: a mode of the engine, such as exact or fast.
        cache: folder for files that the engine keeps between runs.
        context_tokens: capacity of the K/V cache in tokens, for one request at a time; 0 for the engine's usual size.
    """

    model: Path
    dtype: str
    threads: int
    mode: str
    cache: Path
    context_tokens: int = 0


class WorkerEngine(Protocol):
    """An engine that a worker runs."""

    @property
    def packages(self) -> Iterable[str]:
        """Python packages of the engine, whose versions are reported."""

    @property
    def notes(self) -> list[str]:
        """Facts that a reader of the results must know."""

    def run(self, task: Task) -> Done:
        """Run a task."""

    def close(self) -> None:
        """Stop what was started."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """Answer to one prompt.

    Attributes:
        first_s: time from the request to the first token.
        cached_tokens: prompt tokens that were reused; None if the engine does not report it.
    """

    first_s: float
    token_ids: list[int]
    cached_tokens: int | None


def run_worker(start: Callable[[WorkerOptions], WorkerEngine]) -> None:
    """Run an engine: print a ready line, then a line for each task. Other output is redirected to stderr.

    If a task fails, an error is printed, and the next task is read. The threads of matmuls and of OpenMP are limited
    before the engine is imported.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--mode", default="")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--context-tokens", type=int, default=0)
    options = WorkerOptions(**vars(parser.parse_args()))
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` runs
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # libraries, also in C, print to stdout
        engine = start(options)
        try:
            versions = {name: importlib.metadata.version(name) for name in engine.packages}
            print(to_line("ready", Ready(versions, engine.notes)), end="", file=answers, flush=True)
            for line in sys.stdin:
                print(_answer(engine, line), end="", file=answers, flush=True)
        finally:
            engine.close()


def _answer(engine: WorkerEngine, line: str) -> str:
    try:
        return to_line("done", engine.run(Task.from_line(line)))
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is reported, and the others continue
        traceback.print_exc()
        return to_line("error", f"{type(error).__name__}: {error}")


def run_in_threads(task: Task, ask: Callable[[list[int]], WorkerAnswer]) -> Done:
    """Run a task with one thread per request in flight, for engines behind a server."""
    with ThreadPoolExecutor(task.at_once) as executor:
        start_s = time.perf_counter()
        answers = list(executor.map(ask, task.prompts))
        wall_s = time.perf_counter() - start_s
    return Done(
        wall_s,
        [each.first_s for each in answers],
        [each.token_ids for each in answers],
        [each.cached_tokens for each in answers],
    )
