"""Loads the C++ kernels for the processor: the installed ones, or else those in the cache directory.

If neither exists, the kernels are compiled into the cache directory, once. The name of a library there contains digests
of what it was compiled from and of the file itself:

    kernels/<variant>-<digest of options and sources>-<digest of the file>.so

Loading a truncated file would crash the process, so a file is loaded only if it has the digest in its name. Without
Linux and AVX2, or without installed kernels and GCC, there are no kernels, and PyTorch and NumPy compute instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from radixkv.kernels.native.compiler import NotCompiled, compile_kernels, digest_of, is_current, library_name
from radixkv.kernels.native.processor import processor_capability, processor_flags
from radixkv.kernels.native.variants import VARIANTS, Variant

_log = logging.getLogger(__name__)

_INSTALLED = Path(__file__).parent
_MAX_CACHED_LIBRARIES = 8  # two versions of radixkv with four variants each
_CAPABILITIES = ("AVX2", "AVX512", "AMX")

# The values of `Dtype` in `vectors.h`.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def runnable_variants() -> list[Variant]:
    """Return the variants that this processor can run and torch allows, the fastest first."""
    capability, flags = processor_capability(), processor_flags()
    allowed = _CAPABILITIES[: 1 + _CAPABILITIES.index(capability)] if capability in _CAPABILITIES else ()
    return [variant for variant in VARIANTS if variant.capability in allowed and flags.issuperset(variant.features)]


def load_library(
    directory: Path, environment: Mapping[str, str] = os.environ, *, variants: Sequence[Variant] | None = None
) -> ctypes.CDLL:
    """Load the kernels of the first variant that is available, compiling them if necessary.

    Compiling a variant takes 9 to 14 s of CPU time, on all cores that the process may use, and is logged.
    The log names the loaded library.

    Args:
        directory: the cache directory. Its subdirectory `kernels` keeps the eight compiled libraries used last.
        environment: environment variables: `CXX` names the compiler, and `PATH` is searched for it.
        variants: the variants to choose from, the preferred ones first; None for `runnable_variants`.

    Raises:
        NotCompiled: no variant can be found, compiled or loaded.
    """
    reasons = []
    for variant in runnable_variants() if variants is None else variants:
        try:
            library = _load_installed(variant) or _load_or_compile(variant, directory / "kernels", environment)
        except NotCompiled as reason:
            reasons.append(reason)
            continue
        if reasons:
            _log.warning("using kernels for %s, although the processor has faster ones: %s", variant.name, reasons[0])
        _log.info("using kernels for %s: %s", variant.name, library._name)
        return library
    raise reasons[0] if reasons else NotCompiled("they exist for Linux on x86-64 processors with AVX2 only")


def _load_installed(variant: Variant) -> ctypes.CDLL | None:
    """Load the library of the installation; None if the library is missing, outdated or can't be loaded."""
    file = _INSTALLED / library_name(variant)
    if not is_current(file, variant):
        return None
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:  # such as a libstdc++ that is older than the one it was linked with
        _log.info("installed kernels for %s can't be loaded: %s", variant.name, error)
        return None


def _load_or_compile(variant: Variant, folder: Path, environment: Mapping[str, str]) -> ctypes.CDLL:
    """Load the library from the cache directory; compile it first if it is missing."""
    if (library := _load_cached(variant, folder)) is not None:
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            # Another process may have been faster.
            return _load_cached(variant, folder) or _compile(variant, folder, environment)
    except OSError as error:
        raise NotCompiled(
            f"{folder} can't hold compiled kernels ({error}); set XDG_CACHE_HOME to a directory that is writable and "
            f"not mounted noexec, or install radixkv where there is GCC, so that the installation compiles them"
        ) from error


def _load_cached(variant: Variant, folder: Path) -> ctypes.CDLL | None:
    """Load the library from the cache directory; None if it is missing, damaged or can't be loaded."""
    for file in sorted(folder.glob(f"{variant.name}-{digest_of(variant)}-*.so")):
        with suppress(OSError):  # a file that can't be read or loaded is ignored
            if file.stem.endswith(f"-{_content_digest(file)}"):
                library = ctypes.CDLL(str(file))
                with suppress(OSError):
                    os.utime(file)  # `_remove_old_libraries` keeps the libraries that were used last
                return library
    return None


def _compile(variant: Variant, folder: Path, environment: Mapping[str, str]) -> ctypes.CDLL:
    """Compile a variant. The folder must be locked, so that files of an interrupted process can be removed."""

    def load_trial(file: Path) -> None:
        ctypes.CDLL(str(file))
        _log.info("compiling kernels for %s, 5 to 60 s; once", variant.name)

    num_cores, start_s = len(os.sched_getaffinity(0)), time.perf_counter()
    scratch = folder / "unfinished"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        unfinished = scratch / library_name(variant)
        compile_kernels(variant, unfinished, environment, num_jobs=num_cores, check=load_trial)
        name = f"{variant.name}-{digest_of(variant)}-{_content_digest(unfinished)}.so"
        file = unfinished.replace(folder / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _log.info("compiled kernels for %s in %.1f s", variant.name, time.perf_counter() - start_s)
    _remove_old_libraries(folder)
    return ctypes.CDLL(str(file))


def _remove_old_libraries(folder: Path) -> None:
    """Remove all but the libraries that were used last. Processes that have loaded one keep it."""
    with suppress(OSError):
        for file in sorted(folder.glob("*.so"), key=lambda file: file.stat().st_mtime)[:-_MAX_CACHED_LIBRARIES]:
            file.unlink()


def _content_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time compile into a folder."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process that compiles kernels")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
