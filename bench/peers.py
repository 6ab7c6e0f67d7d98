"""Compares radixkv with other engines on a CPU: OpenVINO, vLLM, llama.cpp and transformers, with the same checkpoints.

python -m bench.peers --json bench/results/peers.json --plot docs/peers.svg

Each engine runs in its own process. OpenVINO, vLLM and llama.cpp have virtual environments, which are created once in
the folder `--cache`; the other engines use the environment of the benchmark. Requests are sent to the engines in turn,
and the first tokens of all engines are compared. An engine that cannot be installed, or that crashes, is reported, and
the others continue.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.parts.environment import describe_run
from bench.parts.peers.comparison import Result, compare
from bench.parts.peers.engines import ENGINES, Checkpoints, PeerSetting, build_worker
from bench.parts.peers.environments import RECIPES, Environments, NotInstalled
from bench.parts.peers.machine_limits import Machine, measure_machine, min_time_s
from bench.parts.peers.rows import PeerRow, PeerSample, build_rows
from bench.parts.peers.table import format_table
from bench.parts.peers.worker_process import WorkerFailed, WorkerProcess
from bench.parts.peers.workers.task import Ready
from bench.parts.result_file import write_json

_TINY_THREADS = 2


class PeerComparison:
    """Measures the rows of one setting after another, and collects the results.

    Attributes:
        rows: results so far.
        engines: versions and notes, by engine.
        skipped: engines that could not be installed, each with its reason.
        failures: a message for each time that an engine crashed or failed at a task.
        machines: rates of arithmetic and memory of the machine, by setting.
    """

    def __init__(self, cache: Path, engines: Sequence[str], repetitions: int) -> None:
        self._cache = cache
        self._engine_names = engines
        self._repetitions = repetitions
        self._environments = Environments(cache, RECIPES)
        self._checkpoints = Checkpoints(cache / "models", self._environments)
        self.rows: list[Result] = []
        self.engines: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, str] = {}
        self.failures: list[str] = []
        self.machines: dict[str, Machine] = {}

    def measure(self, setting: PeerSetting, rows: dict[str, PeerRow]) -> None:
        """Measure the machine, then the start of each engine, and then the other rows while all engines run."""
        machine = self.machines[str(setting)] = measure_machine(setting.dtype, setting.threads)
        workers: dict[str, WorkerProcess] | None = None
        with ExitStack() as stack:
            for name, row in rows.items():  # `build_rows` lists the starts first
                if row.unit != "start" and workers is None:
                    workers = self._start_workers(setting, stack)
                start_s = time.monotonic()
                if workers is None:
                    result = compare(name, row, setting, self._measure_starts(row, setting))
                else:
                    samples = self._measure_row(name, row, workers)
                    result = compare(name, row, setting, samples, min_time_s(row, machine))
                self.rows.append(result)
                ratio = "no ratio" if result["ratio"] is None else f"{result['ratio']:.2f} of {result['best_peer']}"
                _say(f"{setting}: {row.title}: {ratio}, in {time.monotonic() - start_s:.0f} s")

    def _build_workers(self, setting: PeerSetting) -> dict[str, WorkerProcess]:
        """Build the workers of all engines that can be installed."""
        workers: dict[str, WorkerProcess] = {}
        for name in self._engine_names:
            if name in self.skipped:
                continue
            try:
                workers[name] = build_worker(name, setting, self._environments, self._checkpoints, self._cache)
            except NotInstalled as error:
                self.skipped[name] = str(error)
                _say(f"skipped {name}: {error}")
        return workers

    def _start_workers(self, setting: PeerSetting, stack: ExitStack) -> dict[str, WorkerProcess]:
        """Start the engines, which stop with `stack`. Returns those that are ready."""
        workers: dict[str, WorkerProcess] = {}
        for name, worker in self._build_workers(setting).items():
            stack.enter_context(worker)
            try:  # one at a time, since some compile while they start
                ready = worker.wait_until_ready()
            except WorkerFailed as error:
                self._report_failure(f"{setting}: {error}")
                worker.stop()
                continue
            self._note_ready(name, ready)
            workers[name] = worker
            _say(f"{setting}: {name} is ready")
        return workers

    def _note_ready(self, engine: str, ready: Ready) -> None:
        entry = self.engines.setdefault(engine, {"versions": ready.versions, "notes": []})
        entry["notes"] += [note for note in ready.notes if note not in entry["notes"]]

    def _measure_starts(self, row: PeerRow, setting: PeerSetting) -> dict[str, list[PeerSample]]:
        """Start and stop the engines one at a time, in an order that alternates."""
        workers = self._build_workers(setting)
        samples: dict[str, list[PeerSample]] = {engine: [] for engine in workers}
        for number in range(-1, self._repetitions):  # the first one fills caches on disk, such as compiled kernels
            for engine in list(workers) if number % 2 else list(workers)[::-1]:
                start_s = time.monotonic()
                try:
                    with workers[engine] as worker:
                        ready = worker.wait_until_ready()
                        sample = PeerSample(time.monotonic() - start_s, worker.cpu_s, (), None)
                except WorkerFailed as error:
                    self._report_failure(f"{row.title}: {error}")
                    del workers[engine]
                    continue
                self._note_ready(engine, ready)
                if number >= 0:
                    samples[engine].append(sample)
        return samples

    def _measure_row(self, name: str, row: PeerRow, workers: dict[str, WorkerProcess]) -> dict[str, list[PeerSample]]:
        """Measure repetitions in turn, in an order that alternates. An engine that fails skips the remaining ones."""
        samples: dict[str, list[PeerSample]] = {engine: [] for engine in workers}
        running = dict(workers)
        for number in range(-1, self._repetitions):  # the first one fills caches and warms up
            for engine in list(running) if number % 2 else list(running)[::-1]:
                worker = running[engine]
                try:
                    if number >= 0:
                        samples[engine].append(row.measure(worker.run, f"{name} {number}"))
                    elif (filling := row.filling_task()) is not None:
                        worker.run(filling)
                    else:
                        row.measure(worker.run, f"{name} warm-up")
                except WorkerFailed as error:
                    self._report_failure(f"{row.title}: {error}")
                    del running[engine]
                    if not worker.is_running:
                        workers.pop(engine).stop()
        return samples

    def _report_failure(self, message: str) -> None:
        self.failures.append(message)
        _say(f"FAILED {message}")


def plan(options: argparse.Namespace) -> list[tuple[PeerSetting, dict[str, PeerRow]]]:
    """List the settings with their rows. The rows of the embedded model always have two threads and float32."""
    rows = {name: row for name, row in build_rows(is_quick=options.quick).items() if name in options.rows}
    large_rows = {name: row for name, row in rows.items() if row.model == "llama"}
    tiny_rows = {name: row for name, row in rows.items() if row.model == "tiny"}
    settings = [
        (PeerSetting("llama", dtype, threads), large_rows) for threads in options.threads for dtype in options.dtypes
    ]
    planned = [*settings, (PeerSetting("tiny", "float32", _TINY_THREADS), tiny_rows)]
    return [(setting, setting_rows) for setting, setting_rows in planned if setting_rows]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Raises SystemExit if it is wrong."""
    names = list(build_rows())
    parser = argparse.ArgumentParser(description="Compare radixkv with other engines on a CPU.", allow_abbrev=False)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="E")
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=names, metavar="R", help=f"rows to measure, of {', '.join(names)}"
    )
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="for the rows of the large model")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short prompts, 2 repetitions: a smoke test")
    parser.add_argument(
        "--cache", type=Path, default=Path("build/peers"), help="environments, models; kept between runs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every setting")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repetitions = min(options.repetitions, 2)
    if options.repetitions < 1 or min(options.threads) < 1:
        parser.error("--repetitions, --threads: expected at least 1")
    for file in (options.json, options.plot):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"expected a directory, got none at {file.absolute().parent}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON and draw. Returns 1 if an engine failed at something, else 0."""
    options = parse_options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that every worker is stopped
    comparison = PeerComparison(options.cache, options.engines, options.repetitions)
    start_s = time.monotonic()

    def build_result() -> dict[str, Any]:
        return {
            "rows": comparison.rows,
            "engines": comparison.engines,
            "skipped": comparison.skipped,
            "failures": comparison.failures,
            "machine_limits": {setting: asdict(machine) for setting, machine in comparison.machines.items()},
            "repetitions": options.repetitions,
            "seconds": time.monotonic() - start_s,
            "load": os.getloadavg()[0],
            **describe_run("bench.peers", arguments),
        }

    try:
        for setting, rows in plan(options):
            comparison.measure(setting, rows)
            if options.json:
                write_json(options.json, build_result())
    except KeyboardInterrupt:
        _say("interrupted; the rows measured so far:")
    if options.json:
        write_json(options.json, build_result())
    print(format_table(comparison.rows, comparison.skipped, comparison.failures))
    if options.plot and comparison.rows:
        from bench.parts.peers.picture import draw_comparison

        machine = build_result()["machine"]
        draw_comparison(options.plot, comparison.rows, f"{machine['cpu']}, {machine['cores']} cores")
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())
