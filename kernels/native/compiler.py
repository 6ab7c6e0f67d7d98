"""Compiles the C++ files of this folder with GCC into one shared library for each variant.

Installation (`setup.py`) and the first start (`library.py`) both call this module, so that results have the same bits
wherever the sources were compiled. It imports only Python's standard library.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from radixkv.kernels.native.variants import Variant

_FOLDER = Path(__file__).parent
_STAMP_SOURCE = "stamp.cpp"
# The options of all variants: baseline x86-64, whatever the compiler's default is. A variant adds options of its own.
# -ffp-contract=off is needed because the bits of a result must not depend on which multiplications and additions a
# compiler fuses.
_OPTIONS = ("-std=c++17", "-O3", "-march=x86-64", "-mtune=generic", "-ffp-contract=off", "-pthread", "-fPIC")
_TIMEOUT_S = 300.0


class NotCompiled(Exception):
    """There are no compiled kernels for this machine. The message gives the reason and the remedy."""


def sources() -> list[str]:
    """Return the text of the C++ files."""
    return [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.[ch]*"))]


def digest_of(variant: Variant) -> str:
    """Return a digest, 16 hexadecimal digits, of the options and sources that a variant is compiled from."""
    return hashlib.sha256("\n".join([*_OPTIONS, *variant.options, *sources()]).encode()).hexdigest()[:16]


def library_name(variant: Variant) -> str:
    """Return the name of the file that installation compiles for a variant."""
    return f"kernels_{variant.name}.so"


def is_current(file: Path, variant: Variant) -> bool:
    """Return whether a library was compiled from the current sources for a variant. The file is read, not loaded."""
    try:
        return _stamp(variant).encode() in file.read_bytes()
    except OSError:
        return False


def compile_kernels(
    variant: Variant,
    file: Path,
    environment: Mapping[str, str] = os.environ,
    *,
    num_jobs: int = 1,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Compile a variant, which takes 9 to 14 s on one idle core. The file is created atomically.

    Args:
        variant: what to compile for; this processor need not support it.
        file: path of the library; its folder must exist.
        environment: environment variables: `CXX` names the compiler, and `PATH` is searched for it.
        num_jobs: number of files that are compiled at a time.
        check: called with a small trial library in the same folder, before the kernels are compiled.

    Raises:
        NotCompiled: there is no C++ compiler, or it fails.
        OSError: the folder can't be written to, or `check` raised it.
    """
    compiler = _find_compiler(environment)
    options = (*_OPTIONS, *variant.options, f'-DRADIXKV_STAMP="{_stamp(variant)}"')
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        folder = Path(directory)

        def compile_file(source: Path) -> str:
            target = str(folder / f"{source.stem}.o")
            _run_compiler(*compiler, *options, "-c", str(source), "-o", target)
            return target

        def link(objects: list[str], name: str) -> Path:
            _run_compiler(*compiler, "-shared", "-pthread", *objects, "-o", str(folder / name))
            return folder / name

        stamp = compile_file(_FOLDER / _STAMP_SOURCE)
        if check is not None:
            check(link([stamp], "trial.so"))
        kernel_sources = [source for source in sorted(_FOLDER.glob("*.cpp")) if source.name != _STAMP_SOURCE]
        with ThreadPoolExecutor(num_jobs) as pool:
            library = link([stamp, *pool.map(compile_file, kernel_sources)], "kernels.so")
        library.replace(file)


def _stamp(variant: Variant) -> str:
    return f"radixkv kernels {variant.name} {digest_of(variant)}"


def _find_compiler(environment: Mapping[str, str]) -> list[str]:
    """Return the compiler's command. `CXX` may have arguments, such as `ccache g++`."""
    requested = shlex.split(environment.get("CXX", ""))
    for command in [requested] if requested else [["g++"], ["c++"]]:
        if program := shutil.which(command[0], path=environment.get("PATH")):
            return [program, *command[1:]]
    if requested:
        raise NotCompiled(f"CXX names {requested[0]}, which does not exist; set it to GCC's C++ compiler, or unset it")
    raise NotCompiled("there is no g++ or c++; install GCC (Debian, Ubuntu: apt install g++), or set CXX to it")


def _run_compiler(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        first_error = next((line for line in lines if "error:" in line), lines[-1])
        raise NotCompiled(f"{command[0]} ended with status {error.returncode}: {first_error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{command[0]}: {error}") from error
