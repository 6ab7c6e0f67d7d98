"""A checkpoint gets its final name when it is complete, and the command of each engine names its own checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.parts.peers.engines import ENGINES, Checkpoints, PeerSetting, build_worker
from bench.parts.peers.environments import NotInstalled

SETTING = PeerSetting("tiny", "bfloat16", 2)


class RecordingEnvironments:
    """Imitates `Environments`: instead of running a command, records it and creates the directory that it names."""

    def __init__(self) -> None:
        self.commands: list[tuple[str | None, list[str]]] = []
        self.is_broken = False

    def python(self, name: str | None) -> Path:
        return Path(f"/{name}/python")

    def variables(self) -> dict[str, str]:
        return {}

    def run(self, name: str | None, arguments: list[str | Path], what: str) -> None:
        self.commands.append((name, [str(each) for each in arguments]))
        Path(arguments[-1]).mkdir()
        if self.is_broken:
            raise NotInstalled(f"{what}: no")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_reads_its_own_format(engine: str, tmp_path: Path) -> None:
    environments = RecordingEnvironments()
    checkpoints = Checkpoints(tmp_path / "models", environments)  # type: ignore[arg-type]
    worker = build_worker(engine, SETTING, environments, checkpoints, tmp_path)  # type: ignore[arg-type]
    command = worker._command
    expected = {"openvino": "tiny-openvino", "llama.cpp": "tiny-bfloat16.gguf"}.get(engine, "tiny-bfloat16")
    assert command[0] == f"/{ENGINES[engine].environment}/python"
    assert command[command.index("--model") + 1] == str(tmp_path / "models" / expected)
    assert command[command.index("--threads") + 1] == "2"
    assert (tmp_path / "models" / expected).exists()
    num_commands = len(environments.commands)
    build_worker(engine, SETTING, environments, checkpoints, tmp_path)  # type: ignore[arg-type]
    assert len(environments.commands) == num_commands, "an existing checkpoint is used"


def test_an_incomplete_checkpoint_does_not_get_its_final_name(tmp_path: Path) -> None:
    environments = RecordingEnvironments()
    environments.is_broken = True
    checkpoints = Checkpoints(tmp_path, environments)  # type: ignore[arg-type]
    with pytest.raises(NotInstalled, match="checkpoint tiny-bfloat16: no"):
        checkpoints.transformers(SETTING)
    assert not (tmp_path / "tiny-bfloat16").exists()


def test_workers_are_modules_that_exist() -> None:
    folder = Path(__file__).parents[4] / "bench/parts/peers/workers"
    assert {engine.worker for engine in ENGINES.values()} <= {path.stem for path in folder.glob("*_worker.py")}
