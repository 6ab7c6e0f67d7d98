"""Runs Triton kernels on a CPU in Triton's interpreter, with corrections where it differs from a GPU.

Triton's own switch, TRITON_INTERPRET, works only when it is set before the first import of triton anywhere in the
process. Here launches are redirected instead, for the length of a test, whatever was imported before.

The corrections touch private API of triton 3.6 and 3.9; `test_interpreter.py` holds the canaries.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_TORCH_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BIT_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every launch and device call to the interpreter until the test ends."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(JITFunction, "run", _run_interpreted)
    monkeypatch.setattr(JITFunction, "__call__", _call_interpreted)
    monkeypatch.setattr(interpreter, "_patch_lang", _patch_lang)
    monkeypatch.setattr(interpreter, "_patch_builtin", _patch_builtin)
    monkeypatch.setattr(interpreter, "_get_np_dtype", _get_np_dtype)
    monkeypatch.setattr(interpreter, "_convert_float", _convert_float)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _patch_lang_tensor)
    # Checking each integer operation for overflow makes them 6 times slower.
    monkeypatch.setattr(
        interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)
    )


@cache
def _interpreted(function: Any) -> Any:
    return interpreter.InterpretedFunction(function)


def _run_interpreted(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    _interpreted(function.fn).run(*args, grid=grid, warmup=warmup, **kwargs)


def _call_interpreted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function. The original patches `triton.language` in each call, and never restores it."""
    return _interpreted(function.fn).rewrite()(*args, **kwargs)


_original_convert_float = interpreter._convert_float
_original_create_dot = interpreter.InterpreterBuilder.create_dot
_original_patch_lang = interpreter._patch_lang
_original_patch_lang_tensor = interpreter._patch_lang_tensor
# The original builds its table of dtypes again for each value.
_dtype_of_scalars = cache(interpreter._get_np_dtype)


def _convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Round to nearest even, as the GPU does. The original truncates to bfloat16, and rounds differently to float8."""
    if source not in _TORCH_TYPES or target not in _TORCH_TYPES:
        return _original_convert_float(data, source, target, rounding_mode)
    converted = torch.from_numpy(np.ascontiguousarray(data)).view(_TORCH_TYPES[source]).to(_TORCH_TYPES[target])
    return converted.view(_BIT_TYPES[converted.element_size()]).numpy()


def _create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Multiply bfloat16 values, where the original multiplies their raw bits; and each row of `a` by itself.

    On a GPU, the sums of a row do not depend on the number of rows. In the BLAS behind numpy they do, on some machines.
    """
    a, b = _as_float32(a), _as_float32(b)
    rows = interpreter.TensorHandle(a.data[..., :, np.newaxis, :], a.dtype)  # [..., M, 1, K]
    columns = interpreter.TensorHandle(b.data[..., np.newaxis, :, :], b.dtype)  # [..., 1, K, N]
    sums = interpreter.TensorHandle(d.data[..., :, np.newaxis, :], d.dtype)  # [..., M, 1, N]
    product = _original_create_dot(self, rows, columns, sums, *options)
    return interpreter.TensorHandle(product.data[..., 0, :], product.dtype)


def _get_np_dtype(kind: Any) -> Any:
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else _dtype_of_scalars(element)


def _patch_lang(_: Any) -> Any:
    """Patch the language once per launch, in both modules from which kernels and their functions import it."""
    return _original_patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    """List the functions to patch in a package. The first call must come before any of them is patched."""
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Let a value be the bound of a loop. triton 3.6 passes an array of one dimension, which numpy 2.4 rejects."""
    _original_patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _as_float32(handle: Any) -> Any:
    if handle.dtype != tl.bfloat16:
        return handle
    data = _convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)
