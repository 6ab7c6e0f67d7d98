"""Compiles the C++ files of this folder for the processor at hand, once, and loads the result.

There is nothing to load without Linux, AVX2, or GCC as `c++`, `g++` or `$CXX`; then torch and numpy do what it
would. The library is kept in a folder, under a name that says what it was made of, and what is in it:

    native-<digest of sources, compiler and processor>-<digest of the file>.so

To load half a file would end the process, so a file is loaded only if it has the digest that its name says.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from radixkv.kernels.native.processor import processor_capability, processor_facts

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# Bits must not depend on what a compiler fuses where.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-pthread", "-fPIC")
# Left out, by what a processor is taken to have.
_LEFT_OUT = {"AMX": (), "AVX512": ("-mno-amx-bf16",), "AVX2": ("-mno-amx-bf16", "-mno-avx512f")}
_TIMEOUT_S = 300.0

# How numbers are stored, as `vectors.h` counts.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NotCompiled(Exception):
    """There is no library for this machine. The message says why."""


def load_library(
    folder: Path, environment: Mapping[str, str] = os.environ, *, capability: str | None = None
) -> ctypes.CDLL:
    """Load the library, and compile it first if the folder has none that can be loaded: some seconds. Logs that.

    Args:
        folder: where it is kept; made if it is missing.
        environment: names the compiler, `CXX`, and where to look for one, `PATH`.
        capability: what may be used, AMX, AVX512 or AVX2; None takes what `processor_capability` says.

    Raises:
        NotCompiled: it can't be made or loaded here.
    """
    capability = capability or processor_capability()
    if platform.system() != "Linux" or capability not in _LEFT_OUT:
        raise NotCompiled("it needs Linux and a processor with AVX2")
    compiler, flags = _find_compiler(environment), (*_FLAGS, *_LEFT_OUT[capability])
    name = f"native-{_digest(compiler, flags)}"
    with contextlib.suppress(OSError):  # a file can't be read or loaded
        for file in sorted(folder.glob(f"{name}-*.so")):
            if file.stem == f"{name}-{_digest_of(file)}":
                return ctypes.CDLL(str(file))
    try:
        start_s = time.perf_counter()
        file = _compile(compiler, flags, folder, name)
        _log.info("compiled kernels for this processor in %.1f s: %s", time.perf_counter() - start_s, file)
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NotCompiled(f"{folder}: {error}") from error


def sources() -> list[str]:
    """Return the text of the C++ files."""
    return [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.[ch]*"))]


def _find_compiler(environment: Mapping[str, str]) -> str:
    names = [environment["CXX"]] if environment.get("CXX") else ["c++", "g++"]
    found = next(filter(None, (shutil.which(name, path=environment.get("PATH")) for name in names)), None)
    if found is None:
        raise NotCompiled(f"it needs GCC, and there is no {' or '.join(names)}")
    return found


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    """Name all that decides what is compiled."""
    version = _run(compiler, "--version")
    parts = [version, torch.__version__, *flags, *processor_facts(), *sources()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], folder: Path, name: str) -> Path:
    """Make the library. Nobody sees half of it, also where several processes make it at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        objects, made = [], Path(directory) / f"{name}.so"
        for source in sorted(_FOLDER.glob("*.cpp")):
            objects.append(str(made.with_name(f"{source.stem}.o")))
            _run(compiler, *flags, "-c", str(source), "-o", objects[-1])
        _run(compiler, "-shared", "-pthread", *objects, "-o", str(made))
        _sync(made)
        file = made.replace(folder / f"{name}-{_digest_of(made)}.so")
    with contextlib.suppress(OSError):  # not every filesystem can, and what is lost is made again
        _sync(folder)
    return file


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would outlast a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotCompiled(f"{command[0]} ended with status {error.returncode}: {last_line}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{command[0]}: {error}") from error
