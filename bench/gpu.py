"""Runs everything that needs a GPU, in less than nine minutes: answers, kernels, time to first token, exact mode.

    python -m bench.gpu --out build/gpu [--sglang UNPACKED_WHEEL]
    python -m bench.gpu --out build/gpu --dry-run                        # on any machine; its times say nothing

Needs no installed radixkv and no network. Each stage is a process with its own time limit. A stage that lacks a module,
fails or runs out of time is named at the end, and the others run. Each stage writes a file with its name; one that ran
out of time leaves the rows it had, with `is_finished` false. `gpu.json` has all outcomes and the end of what each stage
printed. Outside a git checkout, RADIXKV_COMMIT names the commit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.parts.environment import describe_run
from bench.parts.result_file import write_json

ROOT = Path(__file__).parent.parent

_KERNEL_IMPORTS = ("numpy", "torch", "triton")
_ENGINE_IMPORTS = (*_KERNEL_IMPORTS, "safetensors", "sortedcontainers", "transformers", "xxhash")
# modules of the service, which no stage needs, and of a peer that is optional
_OTHER_IMPORTS = ("flashinfer", "google.protobuf", "grpc", "pytest")

_SGLANG = "sglang_wheel"  # where stages look for SGLang's wheel

# What a stage printed is kept if it is killed, and no stage uses the network.
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}

_OUTPUT_CHARACTERS = 20_000
_SHOWN_LINES = 100

Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """One process of the run.

    Attributes:
        name: name of the stage and of its result file.
        budget_s: seconds after which it is killed.
        needs: modules without which it is not started.
        command: arguments of `python`.
        dry_command: arguments of `python` for a small run on a CPU; None for `command` with `--dry-run`.
        has_result: whether it takes `--json FILE`.
        takes_sglang: whether it takes `--sglang FOLDER`.
    """

    name: str
    budget_s: float
    needs: tuple[str, ...]
    command: str
    dry_command: str | None = None
    has_result: bool = True
    takes_sglang: bool = False


def missing_imports(names: Sequence[str]) -> list[str]:
    """Return the modules that can't be imported here."""
    return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that contains it
        return False


# Each test compiles its own kernels, which takes one core.
_PYTEST = "-m pytest -q -p no:cacheprovider" + ("" if missing_imports(["xdist"]) else " -n 8")

# Stages that others rest on come first, comparisons last. The budgets add up to more than nine minutes: they end stages
# that hang. Each kernel has its own process, since an illegal access ends all work of a process on a GPU.
STAGES = (
    Stage(
        "kernel_tests",
        90,
        (*_KERNEL_IMPORTS, "pytest"),
        f"{_PYTEST} -W default --maxfail 20 tests/kernels/test_write_kv.py tests/kernels/test_copy_blocks.py "
        "tests/kernels/test_paged_attention.py tests/kernels/test_dequantize_blocks.py tests/kernels/test_linear.py "
        "tests/kernels/test_norm.py tests/kernels/test_swiglu.py tests/kernels/test_pack_queries.py",
        f"{_PYTEST} tests/kernels/test_copy_blocks.py",
        has_result=False,
    ),
    Stage(
        "graphs",
        60,
        (*_ENGINE_IMPORTS, "pytest"),
        "-m pytest -q -p no:cacheprovider -W default tests/compute/graphs/test_graphs_on_gpu.py",
        "-m pytest -q -p no:cacheprovider tests/compute/graphs/test_graphs.py -k smallest",
        has_result=False,
    ),
    Stage("write_kv", 40, _KERNEL_IMPORTS, "-m bench.kernels --kernels write_kv"),
    Stage("copy_blocks", 40, _KERNEL_IMPORTS, "-m bench.kernels --kernels copy_blocks"),
    Stage("rows", 40, _KERNEL_IMPORTS, "-m bench.kernels --kernels add_rms_norm swiglu"),
    Stage("attention", 100, _KERNEL_IMPORTS, "-m bench.kernels --kernels paged_attention --peers"),
    Stage("shared_prefix", 40, _KERNEL_IMPORTS, "-m bench.kernels --kernels shared_prefix"),
    Stage(
        "exact_cases",
        75,
        _ENGINE_IMPORTS,
        "-m tests.model.exact.exact_cases --device cuda --dtype bfloat16 --cases 80",
        "-m tests.model.exact.exact_cases --device cpu --cases 64",
        has_result=False,
    ),
    Stage("gpu_prefill", 140, _ENGINE_IMPORTS, "-m bench.gpu_prefill --rounds 3"),
    Stage(
        "attention_peers",
        130,
        _KERNEL_IMPORTS,
        "-m bench.kernels --kernels paged_attention --no-variants",
        takes_sglang=True,
    ),
    Stage(
        "exactness",
        60,
        _ENGINE_IMPORTS,
        "-m bench.exactness --device cuda --shape 8b --layers 32 --dtypes bfloat16 --rounds 3",
        "-m bench.exactness --shape tiny --dtypes float32 --rounds 1 --prompts 70 --suffixes 3",
    ),
    Stage(
        "bookkeeping",
        40,
        _ENGINE_IMPORTS,
        "-m bench.bookkeeping --device cuda --shape 8b --layers 32 --dtype bfloat16 --rounds 3",
        "-m bench.bookkeeping --shape tiny --rounds 1 --prompts 100 --batches 4 --generations 2 --new-tokens 5",
    ),
)


def lay_out(folder: Path, sglang: Path | None) -> None:
    """Lay out the import namespace with links, as an installation would: kernels and service inside radixkv.

    Args:
        folder: an empty folder.
        sglang: folder of SGLang's unpacked wheel, linked as well; None if there is none.
    """
    package = folder / "radixkv"
    package.mkdir()
    for source in (*(ROOT / "radixkv").iterdir(), ROOT / "kernels", ROOT / "service"):
        if source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    for name in ("bench", "tests", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    if sglang is not None:
        (folder / _SGLANG).symlink_to(sglang.resolve())


def run_stage(stage: Stage, command: Sequence[str], folder: Path, out: Path, budget_s: float) -> Outcome:
    """Run one stage to its end or until its time is up, and keep what it wrote.

    Args:
        stage: the stage to run.
        command: arguments of `python`, without the result file.
        folder: folder with the import namespace; unfinished result files are written there too.
        out: folder for the results.
        budget_s: seconds after which the stage and all processes it started are killed.

    Returns:
        `outcome` in words (`ran` on success), `seconds`, `command`, and the end of its `output`.
    """
    written, printed = folder / f"{stage.name}.json", folder / f"{stage.name}.log"
    arguments = [sys.executable, *command, *(("--json", str(written)) if stage.has_result else ())]
    start_s = time.monotonic()
    with printed.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=budget_s)
            outcome = "ran" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"out of time after {budget_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds, shown = time.monotonic() - start_s, shlex.join(["python", *command])
    has_result = written.exists()
    if has_result:
        write_json(out / written.name, {**json.loads(written.read_text(encoding="utf-8")), "command": shown})
    return {
        "outcome": outcome,
        "seconds": seconds,
        "command": shown,
        "has_result": has_result,
        "output": printed.read_text(encoding="utf-8", errors="replace")[-_OUTPUT_CHARACTERS:],
    }


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Run the stages, print their output and a table. Returns 1 if a stage failed."""
    options = _parse(arguments, stages)
    options.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + options.seconds
    missing = missing_imports((*_ENGINE_IMPORTS, *_OTHER_IMPORTS))
    report: dict[str, Any] = {
        "is_dry_run": options.dry_run,
        "missing_imports": missing,
        "command": shlex.join(["python", "-m", "bench.gpu", *(sys.argv[1:] if arguments is None else arguments)]),
        **describe_run(),
        "stages": {},
    }
    print(f"{report['machine']['gpu'] or 'no GPU'}, {report['versions']}")
    print(f"can't be imported here: {', '.join(missing) or 'nothing'}")
    for stage in stages:
        if options.only and stage.name not in options.only:
            continue
        budget_s = min(stage.budget_s, end_s - time.monotonic())
        print(f"\n== {stage.name}", flush=True)
        (options.out / f"{stage.name}.json").unlink(missing_ok=True)  # from an earlier run
        if lacking := missing_imports(stage.needs):
            outcome = _not_run(f"not run: {', '.join(lacking)} can't be imported")
        elif budget_s <= 0:
            outcome = _not_run("not run: no time left")
        else:
            with tempfile.TemporaryDirectory() as folder:
                lay_out(Path(folder), options.sglang)
                outcome = run_stage(stage, _command(stage, options), Path(folder), options.out, budget_s)
        print("\n".join(outcome["output"].splitlines()[-_SHOWN_LINES:]))
        report["stages"][stage.name] = outcome
        write_json(options.out / "gpu.json", report)
    print("\n" + format_outcomes(report["stages"]))
    return 0 if all(outcome["outcome"] == "ran" for outcome in report["stages"].values()) else 1


def _not_run(why: str) -> Outcome:
    return {"outcome": why, "seconds": 0.0, "command": None, "has_result": False, "output": ""}


def _command(stage: Stage, options: argparse.Namespace) -> list[str]:
    command = stage.command
    if options.dry_run:
        command = stage.dry_command or f"{command} --dry-run"
    if stage.takes_sglang and options.sglang:
        command += f" --sglang {_SGLANG}"
    return shlex.split(command)


def format_outcomes(outcomes: dict[str, Outcome]) -> str:
    """Format how each stage ended, how long it took and where its results are."""
    lines = [f"{'stage':<16} {'seconds':>7}  {'results':<22} outcome"]
    for name, outcome in outcomes.items():
        file = f"{name}.json" if outcome["has_result"] else "-"
        lines.append(f"{name:<16} {outcome['seconds']:>7.1f}  {file:<22} {outcome['outcome']}")
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None, stages: Sequence[Stage]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in stages], help="run only these stages")
    parser.add_argument("--seconds", type=float, default=510, help="time for all stages together; default 510")
    parser.add_argument("--sglang", type=Path, help="folder of SGLang's unpacked wheel")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on the CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
