"""Imports transformers without PyTorch's compiler, which serving does not use."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils")  # all models import them

_log = logging.getLogger(__name__)


def import_transformers() -> None:
    """Import what all models of transformers import, for processes whose memory matters.

    transformers marks some functions for the compiler with decorators, for which it imports torch._dynamo: 2 s of CPU
    time and 90 MB, or 150 MB if triton is installed. While transformers is imported, a stand-in takes its place, whose
    decorators return the function itself. Code that needs the compiler later imports the real one.
    """
    package = importlib.util.find_spec(_COMPILER)
    if _COMPILER in sys.modules or package is None:
        return
    stand_in = _StandIn(_COMPILER)
    stand_in.__spec__, stand_in.__path__ = package, package.submodule_search_locations or []
    sys.modules[_COMPILER] = stand_in
    try:
        for name in _MODULES:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - another version of transformers may need anything of it
        _log.debug("transformers needs PyTorch's compiler: %s", error)
    finally:
        del sys.modules[_COMPILER]


class _StandIn(ModuleType):
    """A module whose functions are decorators that return the decorated function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unchanged if function is None else function
