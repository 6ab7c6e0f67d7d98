"""Single modules of SGLang, imported from its unpacked wheel without the engine that their packages would import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


def load_alone(wheel: Path, name: str, stand_ins: Mapping[str, ModuleType]) -> ModuleType:
    """Import one module, and leave no trace of it in `sys.modules`.

    The packages on its way, and on the way of the stand-ins, are empty: what it imports is either a stand-in or a
    neighbour's file.

    Args:
        wheel: folder of the unpacked wheel.
        name: of the module, with dots.
        stand_ins: by name, what it finds in the place of other modules.

    Raises:
        FileNotFoundError: the folder has no such module.
    """
    if not (wheel / f"{name.replace('.', '/')}.py").exists():
        raise FileNotFoundError(f"--sglang: expected an unpacked wheel with {name.replace('.', '/')}.py, got {wheel}")
    for module in (name, *stand_ins):
        for package in _packages(module):
            sys.modules[package] = empty = ModuleType(package)
            empty.__path__ = [str(wheel / package.replace(".", "/"))]
    sys.modules |= stand_ins
    try:
        return importlib.import_module(name)
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "sglang"]:
            del sys.modules[loaded]


def _packages(name: str) -> list[str]:
    """All that a dotted name is inside of, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
