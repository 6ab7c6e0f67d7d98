"""Imports single modules of SGLang from its unpacked wheel, without the engine that their packages import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


def load_without_package(wheel: Path, name: str, stand_ins: Mapping[str, ModuleType]) -> ModuleType:
    """Import one module without importing the packages that contain it. Afterwards `sys.modules` has none of SGLang.

    Empty modules replace its parent packages and those of the stand-ins, so no `__init__.py` of SGLang is run.

    Args:
        wheel: folder of the unpacked wheel.
        name: dotted name of the module.
        stand_ins: modules by name that replace other modules.

    Raises:
        FileNotFoundError: the folder has no such module.
    """
    if not (wheel / f"{name.replace('.', '/')}.py").exists():
        raise FileNotFoundError(f"--sglang: expected an unpacked wheel with {name.replace('.', '/')}.py, got {wheel}")
    for dotted_name in (name, *stand_ins):
        for package in _packages(dotted_name):
            sys.modules[package] = empty = ModuleType(package)
            empty.__path__ = [str(wheel / package.replace(".", "/"))]
    sys.modules |= stand_ins
    try:
        return importlib.import_module(name)
    finally:
        for module_name in [module_name for module_name in sys.modules if module_name.partition(".")[0] == "sglang"]:
            del sys.modules[module_name]


def _packages(name: str) -> list[str]:
    """Return the packages above a dotted name, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
