"""The generated code in radixkv/v1 and radixkv/gateway is up to date with proto/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = (
    "-m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. "
    "proto/radixkv/v1/*.proto proto/radixkv/gateway/*.proto"
)


def generated(folder: Path) -> dict[str, bytes]:
    """Return the contents of the generated files in a folder, by name."""
    paths = [*folder.glob("*_pb2*.py"), *folder.glob("*_pb2*.pyi")]
    return {path.name: path.read_bytes() for path in paths}


def test_make_proto_runs_the_tested_command() -> None:
    assert RECIPE in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", ["radixkv/v1", "radixkv/gateway"])
def test_generated_code_is_up_to_date(folder: str, tmp_path: Path) -> None:
    sources = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "proto" / folder).glob("*.proto"))]
    options = [
        option.replace("_out=.", f"_out={tmp_path}") for option in RECIPE.split() if not option.endswith(".proto")
    ]
    subprocess.run([sys.executable, *options, *sources], cwd=ROOT, check=True)
    fresh, committed = generated(tmp_path / folder), generated(ROOT / folder)
    assert len(fresh) == 3 * len(sources)  # messages, their type stubs, and services
    assert sorted(fresh) == sorted(committed)
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make proto`"
