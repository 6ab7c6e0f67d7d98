"""The examples of docs/examples/library print what transformers alone prints, and are shorter."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.model.tiny_files import write_tiny_files
from radixkv.model.tiny_model import build_tiny_model
from tests.patience import PATIENCE_S

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "library"
NAMES = ("evaluation", "documents", "agent")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_model("eager").save_pretrained(folder)
    write_tiny_files(folder)
    return folder


def output_of(file: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / file), *arguments],
        env={**os.environ, "PYTHONWARNINGS": "error::FutureWarning"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def count_statements(file: str) -> int:
    """Return the number of statements of a program, not counting imports."""
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    return sum(
        isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree)
    )


def parse_reuse(line: str) -> tuple[int, int]:
    """Return the numbers of reused tokens and of all tokens in the last line that an example prints."""
    match = re.fullmatch(r"(\d+) of (\d+) tokens reused", line)
    assert match is not None, line
    return int(match[1]), int(match[2])


def test_the_page_names_every_example() -> None:
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in FOLDER.glob("*.py")}
    assert files == {f"{name}{suffix}.py" for name in NAMES for suffix in ("", "_in_transformers")}
    assert set(re.findall(r"\[\w+\.py\]\(library/(\w+\.py)\)", page)) == files


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_what_transformers_alone_prints(model: Path, name: str) -> None:
    *ours, our_reuse = output_of(f"{name}.py", str(model))
    *theirs, their_reuse = output_of(f"{name}_in_transformers.py", str(model))
    assert ours == theirs
    assert len(ours) >= 3
    (cached, total), (their_cached, their_total) = parse_reuse(our_reuse), parse_reuse(their_reuse)
    assert total == their_total
    assert cached >= their_cached > 0


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_with_the_embedded_model_and_is_shorter_than_in_transformers(name: str) -> None:
    num_reused, _ = parse_reuse(output_of(f"{name}.py")[-1])
    assert num_reused > 0
    ours, theirs = f"{name}.py", f"{name}_in_transformers.py"
    assert count_statements(ours) < count_statements(theirs)
    assert len((FOLDER / ours).read_text().splitlines()) < 0.75 * len((FOLDER / theirs).read_text().splitlines())
