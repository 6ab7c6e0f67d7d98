"""Tests of imports without PyTorch's compiler."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from radixkv.startup.lean_imports import _CompilerStandIn, _SubmoduleFinder

# The compiler of a fake package: it records the functions that are marked for it.
_COMPILER_SOURCE = """
from {package}._dynamo import config
loads = config.loads
marked = []
def allow_in_graph(function):
    marked.append(function)
    return function
def assume_constant_result(function):
    marked.append(function)
    return function
def compile(function):
    return "compiled"
"""

_SCRIPT = """
import sys
from radixkv.startup.lean_imports import import_transformers
import_transformers()
import torch
from radixkv.config import ModelConfig
from radixkv.model.loading import load_model
load_model(ModelConfig(path="tiny", device="cpu"))
for name in ("torch._inductor", "torch.distributed.tensor", "triton"):
    assert name not in sys.modules, name
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
from transformers.masking_utils import TransformGetItemToIndex
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as real
assert isinstance(TransformGetItemToIndex(), real)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that imitates torch: its compiler `_dynamo` is a stand-in until the compiler is used."""
    name = "torch_of_a_test"
    folder = tmp_path / name / "_dynamo"
    folder.mkdir(parents=True)
    (tmp_path / name / "__init__.py").touch()
    (folder / "__init__.py").write_text(_COMPILER_SOURCE.format(package=name))
    (folder / "config.py").write_text("loads = []\nloads.append(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders_before = list(sys.meta_path)
    package = importlib.import_module(name)
    compiler = _CompilerStandIn(package)
    sys.modules[compiler.__name__] = package.__dict__["_dynamo"] = compiler
    sys.meta_path.insert(0, _SubmoduleFinder(compiler))
    yield package
    sys.meta_path[:] = finders_before
    for module_name in list(sys.modules):
        if module_name.startswith(name):
            del sys.modules[module_name]


def test_marks_are_recorded_without_importing_the_compiler(package: ModuleType) -> None:
    @package._dynamo.disable(recursive=False)
    def function() -> int:
        return 3

    assert package._dynamo.allow_in_graph(function) is function
    assert package._dynamo.disable(function, wrapping=False)() == 3
    assert not hasattr(package._dynamo, "__wrapped__")
    assert f"{package.__name__}._dynamo.config" not in sys.modules


def test_the_compiler_is_imported_with_the_marks_when_it_is_used(package: ModuleType) -> None:
    compiler = package._dynamo

    def allowed() -> None: ...

    def constant() -> None: ...

    def disabled() -> None: ...

    compiler.allow_in_graph(allowed)
    compiler.assume_constant_result(constant)
    disabled.__dict__["__dynamo_disable"] = compiler.disable(disabled)
    assert compiler.compile(allowed) == "compiled"
    assert compiler.marked == [allowed, constant]
    assert "__dynamo_disable" not in disabled.__dict__
    assert sys.modules[compiler.__name__] is compiler is package._dynamo
    assert compiler.config.loads == [1]


def test_a_submodule_is_loaded_once_and_after_the_compiler(package: ModuleType) -> None:
    config = importlib.import_module(f"{package.__name__}._dynamo.config")
    assert config is package._dynamo.config is sys.modules[config.__name__]
    assert package._dynamo.loads is config.loads
    assert config.loads == [1]
    assert config.__spec__ is not None
    assert config.__spec__.origin == config.__file__


def test_a_model_is_loaded_without_the_compiler_which_can_be_used_afterwards() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True)
