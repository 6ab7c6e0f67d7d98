"""Runs the GPU benchmarks in parts: the service (`product`), a first look, time to first token, kernels, and peers.

    python -m bench.gpu --out build/gpu --part product        # nine minutes; real servers over gRPC
    python -m bench.gpu --out build/gpu --part product --only bits --seconds 150
    python -m bench.gpu --out build/gpu                       # all parts in turn
    python -m bench.gpu --out build/gpu --part product --dry-run       # on any machine; its times are meaningless

A run needs no installed radixkv and no network. A part ends within ten minutes. It writes one file, `PART.json`, which
is replaced atomically after each row of each stage, so measured rows are not lost if the run is interrupted.

Each stage is a process with its own time limit. If a stage lacks a module, fails or runs out of time, the file says so
and the other stages run. Attention kernels are tried first, in separate processes; later stages do not use those that
did not pass their trial. Outside a git checkout, RADIXKV_COMMIT names the commit.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bench.gpu.parts import ENGINE_IMPORTS, PARTS, REPORTED_IMPORTS
from bench.gpu.product.product_server import stop_servers
from bench.gpu.stage import Outcome, Stage, missing_imports, run_stage
from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from radixkv.model.attention.refused_attention import MODES, NAMES, NATIVE, VARIABLE, format_refused

ROOT = Path(__file__).parents[2]

_SGLANG = "sglang_wheel"  # where stages look for SGLang's wheel
_MAX_SHOWN_LINES = 100
_MAX_SHOWN_LINES_OF_PRODUCT = 12  # a remote run returns only the end of the output, and its table must fit into it
_DRY_BUDGET_FACTOR = 20  # Triton's interpreter is slow, and a dry run may share its cores

# Replaces pytest's settings in pyproject.toml, which need plugins that the machine may lack.
_PYTEST_INI = """\
[pytest]
pythonpath = .
addopts = --import-mode=importlib
faulthandler_timeout = 600
markers =
    gpu: needs a CUDA device
    long: slow compared with what it checks
    sampled(one_in): one of every `one_in` cases is not `long`
    slow: campaigns of many minutes
"""


def lay_out(folder: Path, sglang: Path | None) -> None:
    """Lay out the import namespace with links, as an installation would, with kernels and service inside radixkv.

    Args:
        folder: an empty folder.
        sglang: folder of SGLang's unpacked wheel, linked as well; None if there is none.
    """
    package = folder / "radixkv"
    package.mkdir()
    # `radixkv/kernels` and `radixkv/service` are links in a checkout, which a copy of it may lack.
    sources = {source.name: source for source in (*(ROOT / "radixkv").iterdir(), ROOT / "kernels", ROOT / "service")}
    for name, source in sources.items():
        if name != "__pycache__":
            (package / name).symlink_to(source)
    for name in ("bench", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "pytest.ini").write_text(_PYTEST_INI, encoding="utf-8")
    if sglang is not None:
        (folder / _SGLANG).symlink_to(sglang.resolve())


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Sequence[Stage]] = PARTS) -> int:
    """Run the parts, print their output and a table of each.

    Returns 0 if all stages succeeded, except optional ones that were not started.
    """
    options = _parse(arguments, parts)
    options.out.mkdir(parents=True, exist_ok=True)
    is_good = True
    for part in options.part or parts:
        stages = _choose_stages(parts[part], options.only)
        if stages:
            run = _PartRun(part, arguments, options)
            is_good &= run.run(stages)
    return 0 if is_good else 1


def _choose_stages(stages: Sequence[Stage], only: Sequence[str] | None) -> list[Stage]:
    """Return the requested stages, and the earlier ones that they depend on: servers and kernel trials."""
    if not only:
        return list(stages)
    is_chosen = [stage.name in only for stage in stages]

    server_users = (i for i, stage in enumerate(stages) if is_chosen[i] and stage.servers == "use")
    last_server_user = max(server_users, default=0)
    for i, stage in enumerate(stages):
        is_chosen[i] |= stage.servers == "start" and i < last_server_user

    # A stage that starts servers, chosen above, may also depend on trials.
    trial_users = (
        i for i, stage in enumerate(stages) if is_chosen[i] and (stage.uses_passed_kernels or stage.needs_kernels)
    )
    last_trial_user = max(trial_users, default=0)
    return [stage for i, stage in enumerate(stages) if is_chosen[i] or (stage.tries_kernels and i < last_trial_user)]


class _PassedKernels:
    """Attention kernels of a GPU that passed a trial of this run. Other kernels that can be refused are refused."""

    def __init__(self) -> None:
        self._passed: set[tuple[str, str]] = set()
        self._has_tried = False

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record the trials of a stage: rows with `kernels`, `mode` and `is_right`. Other rows are ignored."""
        self._has_tried = True
        self._passed |= {(row["kernels"], row["mode"]) for row in rows if "kernels" in row and row["is_right"]}

    def has_passed(self, names: Iterable[str]) -> bool:
        """Whether one of these kernels passed, in any mode."""
        return any((name, mode) in self._passed for name in names for mode in MODES)

    def environment(self) -> dict[str, str]:
        """Return the variable that keeps other processes from using refused kernels; empty before the first `note`."""
        if not self._has_tried:
            return {}
        gpu_kernels = [(name, mode) for name in NAMES if name != NATIVE for mode in MODES]
        return {VARIABLE: format_refused(kernel for kernel in gpu_kernels if kernel not in self._passed)}


class _PartRun:
    """A run of one part, and its file."""

    def __init__(self, part: str, arguments: Sequence[str] | None, options: argparse.Namespace) -> None:
        self._options = options
        self._file: Path = options.out / f"{part}.json"
        self._passed_kernels = _PassedKernels()
        if self._file.exists():  # keep earlier results
            self._file.replace(options.out / f"{part}.earlier.json")
        self._report: dict[str, Any] = {
            "part": part,
            "is_dry_run": options.dry_run,
            "is_finished": False,
            "missing_imports": missing_imports((*ENGINE_IMPORTS, *REPORTED_IMPORTS)),
            **describe_run("bench.gpu", arguments),
            "stages": {},
        }
        write_json(self._file, self._report)

    def run(self, stages: Sequence[Stage]) -> bool:
        """Run the stages in turn. Stages for which no time is left are reported as not run.

        Returns whether all stages succeeded, except optional ones that were not started.
        """
        report, is_good = self._report, True
        end_s = time.monotonic() + self._options.seconds * (_DRY_BUDGET_FACTOR if self._options.dry_run else 1)
        print(f"== {report['part']}: {report['machine']['gpu'] or 'no GPU'}, {report['versions']}")
        print(f"modules that cannot be imported: {', '.join(report['missing_imports']) or 'nothing'}", flush=True)
        shown_lines = _MAX_SHOWN_LINES_OF_PRODUCT if report["part"] == "product" else _MAX_SHOWN_LINES
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder_name:
            folder = Path(folder_name)
            lay_out(folder, self._options.sglang)
            try:
                for stage in stages:
                    print(f"\n== {stage.name}", flush=True)
                    if stage.servers is None:
                        stop_servers(folder)
                    budget_s = stage.budget_s * (_DRY_BUDGET_FACTOR if self._options.dry_run else 1)
                    outcome = self._run_stage(stage, folder, min(budget_s, end_s - time.monotonic()))
                    if stage.tries_kernels:
                        self._passed_kernels.note((outcome["result"] or {}).get("rows", []))
                    self._write_outcome(stage.name, outcome)
                    is_skipped_optional = stage.is_optional and outcome["command"] is None
                    is_good &= outcome["outcome"] == "ran" or is_skipped_optional
                    print("\n".join(outcome["output"].splitlines()[-shown_lines:]), flush=True)
            finally:
                stop_servers(folder)
        report["is_finished"] = True
        write_json(self._file, report)
        print("\n" + format_outcomes(report["stages"]), flush=True)
        return is_good

    def _run_stage(self, stage: Stage, folder: Path, budget_s: float) -> Outcome:
        if missing := missing_imports(stage.needs):
            return _not_run(f"not run: {', '.join(missing)} cannot be imported")
        if stage.needs_kernels and not self._passed_kernels.has_passed(stage.needs_kernels):
            return _not_run(f"not run: {', '.join(stage.needs_kernels)}: no trial passed")
        if budget_s <= 0:
            return _not_run("not run: no time left")
        environment = self._passed_kernels.environment() if stage.uses_passed_kernels else {}
        return run_stage(
            stage.name,
            _command(stage, self._options),
            folder,
            budget_s,
            lambda outcome: self._write_outcome(stage.name, outcome),
            environment,
        )

    def _write_outcome(self, name: str, outcome: Outcome) -> None:
        self._report["stages"][name] = outcome
        write_json(self._file, self._report)


def _not_run(reason: str) -> Outcome:
    return {"outcome": reason, "seconds": 0.0, "command": None, "result": None, "output": ""}


def _command(stage: Stage, options: argparse.Namespace) -> list[str]:
    command = stage.command
    if options.dry_run:
        command = stage.dry_command or f"{command} --dry-run"
    if stage.takes_sglang and options.sglang:
        command += f" --sglang {_SGLANG}"
    return shlex.split(command)


def format_outcomes(outcomes: Mapping[str, Outcome]) -> str:
    """Format the outcome of each stage, its duration, its number of rows and of correct ones, and its summary."""
    lines = [f"{'stage':<20} {'seconds':>7} {'right':>9}  outcome"]
    for name, outcome in outcomes.items():
        result = outcome["result"] or {}
        rows = result.get("rows", [])
        num_right = sum(bool(row.get("is_right", True)) for row in rows if isinstance(row, dict))
        right = f"{num_right} of {len(rows)}" if rows else "-"
        summary = f": {result['summary']}" if result.get("summary") else ""
        lines.append(f"{name:<20} {outcome['seconds']:>7.1f} {right:>9}  {outcome['outcome']}{summary}")
    return "\n".join(lines)


def _exit_on_signal(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)  # unwinding the stack kills the running stage


def _parse(arguments: Sequence[str] | None, parts: Mapping[str, Sequence[Stage]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Run what needs a GPU, part by part.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results, with one file per part")
    parser.add_argument("--part", nargs="+", choices=list(parts), help="run only these parts; default all")
    names = list(dict.fromkeys(stage.name for stages in parts.values() for stage in stages))
    parser.add_argument("--only", nargs="+", choices=names, help="run only these stages, and those that they depend on")
    parser.add_argument("--seconds", type=float, default=540, help="time for each part; default 540")
    parser.add_argument("--sglang", type=Path, help="folder of SGLang's unpacked wheel")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on the CPU")
    return parser.parse_args(arguments)


def run_and_exit() -> None:
    """Run as a program: SIGTERM also ends the running stage."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    sys.exit(main())


if __name__ == "__main__":
    run_and_exit()
