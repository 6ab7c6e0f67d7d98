"""Compiles the C++ kernels when radixkv is installed or packaged on Linux x86-64. pyproject.toml has everything else.

Each variant (`kernels/native/variants.py`) is compiled into one library. Libraries are loaded with ctypes and do not
use Python's C API, so a wheel works with all versions of Python 3. Without GCC the installation contains no libraries,
and the first start compiles them.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).parent))  # build front ends do not add this folder

from radixkv.kernels.native.compiler import NotCompiled, compile_kernels, is_current, library_name
from radixkv.kernels.native.variants import VARIANTS

_PACKAGE = "radixkv.kernels.native"
_SOURCES = sorted(str(path) for path in Path(*_PACKAGE.split(".")).glob("*.cpp"))
_VARIANTS = {f"{_PACKAGE}.{Path(library_name(variant)).stem}": variant for variant in VARIANTS}
_IS_SUPPORTED = platform.system() == "Linux" and platform.machine() == "x86_64"


class BuildKernels(build_ext):
    """Compiles the variants in parallel, with the options of `compiler.py` instead of those of Python's build."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = True

    def get_ext_filename(self, fullname: str) -> str:
        return f"{os.path.join(*fullname.split('.'))}.so"

    def build_extension(self, ext: Extension) -> None:
        variant, file = _VARIANTS[ext.name], Path(self.get_ext_fullpath(ext.name))
        if is_current(file, variant):
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        in_place = Path(self.get_ext_filename(ext.name))  # compiled by an earlier editable installation
        if is_current(in_place, variant):
            self.copy_file(in_place, file)
            return
        try:
            num_jobs = max(1, (os.cpu_count() or 1) // len(VARIANTS))
            compile_kernels(variant, file, num_jobs=num_jobs)
        except (NotCompiled, OSError) as error:
            file.unlink(missing_ok=True)
            raise CompileError(str(error)) from error


class PackKernels(bdist_wheel):
    """Tags a wheel that contains libraries for all versions of Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform_tag = super().get_tag()
        return ("py3", "none", platform_tag) if self.distribution.has_ext_modules() else (python, abi, platform_tag)


def _description() -> str:
    """Return the README without links to other files, which lead nowhere on the page of an index."""
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    for pattern in (r"!\[([^\]]*)\]", r"\[([^\]]*)\]"):  # an image may be the text of a link
        readme = re.sub(pattern + r"\((?!https?://)[^)]*\)", r"\1", readme)
    return readme


setup(
    long_description=_description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension(name, _SOURCES, optional=True) for name in _VARIANTS] if _IS_SUPPORTED else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PackKernels},
)
