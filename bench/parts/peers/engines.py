"""The engines that are compared: their worker, their environment, and the checkpoint format that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.parts.peers.environments import Environments
from bench.parts.peers.worker_process import WorkerProcess

OURS = "radixkv"
_WORKERS = "bench.parts.peers.workers"


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """A checkpoint, and the dtype and threads with which it runs. Engines are compared only within a setting.

    Attributes:
        model: llama or tiny.
        dtype: float32 or bfloat16.
        threads: threads that each engine computes with.
    """

    model: str
    dtype: str
    threads: int

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.model}, {self.dtype}, {threads}"


class Checkpoints:
    """Checkpoints in the cache folder. Each is created, atomically, when it is first needed."""

    def __init__(self, folder: Path, environments: Environments) -> None:
        self._folder = folder.absolute()
        self._environments = environments
        self._folder.mkdir(parents=True, exist_ok=True)

    def transformers(self, setting: PeerSetting) -> Path:
        """Return a directory in the format of transformers. Raises NotInstalled if it cannot be created."""
        name = f"{setting.model}-{setting.dtype}"
        arguments: list[str | Path] = ["-m", "bench.parts.peers.checkpoint", setting.model, setting.dtype]
        return self._create_once(name, None, lambda path: [*arguments, path])

    def openvino(self, setting: PeerSetting) -> Path:
        """Return a directory in OpenVINO's format, in float32; OpenVINO rounds it to the dtype in which it computes."""
        source = self.transformers(PeerSetting(setting.model, "float32", setting.threads))
        export: list[str | Path] = ["-c", "from optimum.commands.optimum_cli import main; main()", "export", "openvino"]
        export += ["--task", "text-generation-with-past", "--weight-format", "fp32", "--model", str(source)]
        return self._create_once(f"{setting.model}-openvino", "openvino", lambda path: [*export, path])

    def gguf(self, setting: PeerSetting) -> Path:
        """Return a GGUF file."""
        source = self.transformers(PeerSetting(setting.model, "float32", setting.threads))
        arguments: list[str | Path] = ["-m", "bench.parts.peers.gguf_file", source, setting.dtype]
        return self._create_once(f"{setting.model}-{setting.dtype}.gguf", "llama.cpp", lambda path: [*arguments, path])

    def _create_once(self, name: str, environment: str | None, arguments: Callable[[Path], list[str | Path]]) -> Path:
        checkpoint, partial = self._folder / name, self._folder / f"partial-{name}"
        if not checkpoint.exists():
            self._environments.run(environment, arguments(partial), f"checkpoint {name}")
            partial.replace(checkpoint)
        return checkpoint


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """An engine.

    Attributes:
        worker: module of its worker.
        mode: passed to the worker.
        environment: name of its environment; None for the interpreter that runs the benchmark.
        checkpoint: returns the checkpoint in the format that the engine reads.
    """

    worker: str
    mode: str
    environment: str | None
    checkpoint: Callable[[Checkpoints, PeerSetting], Path]


ENGINES = {
    OURS: PeerEngine("radixkv_worker", "exact", None, Checkpoints.transformers),
    "radixkv-fast": PeerEngine("radixkv_worker", "fast", None, Checkpoints.transformers),
    "openvino": PeerEngine("openvino_worker", "", "openvino", Checkpoints.openvino),
    "vllm": PeerEngine("vllm_worker", "", "vllm", Checkpoints.transformers),
    "llama.cpp": PeerEngine("llamacpp_worker", "", "llama.cpp", Checkpoints.gguf),
    "transformers": PeerEngine("transformers_worker", "generate", None, Checkpoints.transformers),
    "transformers-batching": PeerEngine("transformers_worker", "batching", None, Checkpoints.transformers),
}


def build_worker(
    name: str, setting: PeerSetting, environments: Environments, checkpoints: Checkpoints, cache: Path
) -> WorkerProcess:
    """Create the environment and the checkpoint of an engine, and return a worker that is not started yet.

    Raises:
        NotInstalled: one of them cannot be created.
    """
    engine = ENGINES[name]
    command = [str(environments.python(engine.environment)), "-m", f"{_WORKERS}.{engine.worker}"]
    command += ["--model", str(engine.checkpoint(checkpoints, setting)), "--dtype", setting.dtype]
    command += ["--threads", str(setting.threads), "--mode", engine.mode, "--cache", str(cache.absolute())]
    return WorkerProcess(name, command, environments.variables())
