"""Imports transformers without the parts of PyTorch that compile models or run them on several processes."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MASKING_SUBMODULE = "_trace_wrapped_higher_order_op"  # it contains `TransformGetItemToIndex`
# What the model classes of transformers import.
_MODULES = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation")

_log = logging.getLogger(__name__)

_Function = Callable[..., Any]


def import_transformers() -> None:
    """Import what all models of transformers need. Call it before anything else imports transformers.

    transformers, and the functions of PyTorch that create a model without data, mark functions for PyTorch's compiler.
    To do so they import `torch._dynamo`, which takes one to two seconds and 25 MB, or 90 MB if Triton is installed.
    transformers also imports `torch.distributed.tensor`, with 45 MB, unless PyTorch was built without
    `torch.distributed`. A server compiles no model, and computes in one process.

    Afterwards `torch._dynamo` is a stand-in that records which functions are marked. At the first use of anything else
    in it, such as by `torch.compile`, the stand-in becomes the real module, and the recorded marks are applied. After
    this call, transformers cannot distribute a model over processes.

    If an import fails, as it may with another version of transformers, the usual imports are used.
    """
    import torch

    if _COMPILER in sys.modules or "transformers" in sys.modules:
        return
    compiler = _CompilerStandIn(torch)
    masking = ModuleType(f"{_COMPILER}.{_MASKING_SUBMODULE}")
    masking.__dict__["TransformGetItemToIndex"] = _GetItemToIndex
    sys.modules.update({_COMPILER: compiler, masking.__name__: masking})
    torch.__dict__["_dynamo"] = compiler
    sys.meta_path.insert(0, _SubmoduleFinder(compiler))
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False  # transformers remembers the answer
    try:
        for module in _MODULES:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - the usual import succeeds, or raises the error again
        _log.debug("transformers needs torch._dynamo or torch.distributed when it is imported: %s", error)
        _load_real_module(compiler)
    finally:
        torch.distributed.is_available = is_available
        if sys.modules.get(masking.__name__) is masking:
            del sys.modules[masking.__name__]


class _CompilerStandIn(ModuleType):
    """`torch._dynamo` before it is imported: decorators that record functions and return them unchanged.

    Args:
        torch: the package that contains it.
    """

    def __init__(self, torch: ModuleType) -> None:
        name = f"{torch.__name__}._dynamo"
        super().__init__(name)
        spec = importlib.machinery.PathFinder.find_spec(name, torch.__path__)
        assert spec is not None
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__package__ = name
        self._marked: list[tuple[str, _Function]] = []
        self._disabled: list[_Function] = []

    def allow_in_graph(self, function: _Function) -> _Function:
        """Record that PyTorch's function of this name was called for `function`."""
        self._marked.append(("allow_in_graph", function))
        return function

    def assume_constant_result(self, function: _Function) -> _Function:
        """Record that PyTorch's function of this name was called for `function`."""
        self._marked.append(("assume_constant_result", function))
        return function

    def disable(self, function: _Function | None = None, recursive: bool = True, **_: Any) -> _Function:
        """Record the function and return it unchanged: nothing is compiled yet."""
        if function is None:
            return self.disable
        self._disabled.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _load_real_module(self)
        return getattr(self, name)


def _load_real_module(compiler: ModuleType) -> None:
    """Turn a `_CompilerStandIn` into the real module, with the recorded marks. Does nothing if this has been done."""
    if not isinstance(compiler, _CompilerStandIn):
        return
    marked, disabled = compiler.__dict__.pop("_marked"), compiler.__dict__.pop("_disabled")
    spec = compiler.__spec__
    assert spec is not None
    assert spec.loader is not None
    compiler.__class__ = ModuleType  # type: ignore[assignment]
    sys.modules.pop(f"{compiler.__name__}.{_MASKING_SUBMODULE}", None)
    spec.loader.exec_module(compiler)
    for mark, function in marked:
        getattr(compiler, mark)(function)
    for function in disabled:
        # PyTorch caches the result of `disable` in this attribute. Without the attribute, PyTorch calls the real
        # `disable` at the next use.
        function.__dict__.pop("__dynamo_disable", None)


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the real compiler before its first submodule, as the import system would, and then removes itself."""

    def __init__(self, compiler: _CompilerStandIn) -> None:
        self._compiler = compiler
        self._spec: importlib.machinery.ModuleSpec | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{_COMPILER}."):
            return None
        sys.meta_path.remove(self)
        _load_real_module(self._compiler)
        if name not in sys.modules:
            return None
        self._spec = sys.modules[name].__spec__
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _GetItemToIndex:
    """`TransformGetItemToIndex` of PyTorch, which is imported when transformers creates an object of it."""

    def __new__(cls) -> Any:
        return importlib.import_module(f"{_COMPILER}.{_MASKING_SUBMODULE}").TransformGetItemToIndex()
