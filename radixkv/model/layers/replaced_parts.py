"""Replaces methods of a model's parts (its submodules), such as their forward passes, and restores them."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from radixkv.kernels.gpu.flat_rows import DTYPES
from radixkv.model.refusals import reason_of

_log = logging.getLogger(__name__)

Forward = Callable[..., Any]

# Names of the children of a gated MLP and of a decoder layer.
MLP_PARTS = {"gate_proj", "up_proj", "act_fn", "down_proj"}
LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}

# Numbers of rows of a trial; 17 is not a multiple of a vector's length. The magnitudes of the rows range from 0.001,
# where eps matters, to 10.
_NUM_ROWS = (1, 17)
_NUM_MAGNITUDES = 5

# Tolerances, relative to a row's largest number. Float32 sums depend on their order, so numbers that are rounded to
# fewer bits may differ by up to two roundings. That is rare: with errors of 1e-6, it affects one number in a thousand
# in float16, and fewer in bfloat16. In contrast, rounding in another order changes one number in four, and a scale of
# 1.01 changes all.
_FLOAT32_TOLERANCE = 1e-5
_ROUNDINGS = 2
_MAX_DIFFERENT_SHARE = 0.05  # of the elements

# Tolerances of `is_close`, relative to the largest number.
_SUM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Refused(Exception):
    """A part that looks known failed its trial. The message gives the reason."""


def is_norm(part: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a part has the parameters of an RMS norm, in the dtype of the model's rows."""
    parameters = dict(part.named_parameters())
    weight = parameters.get("weight")
    return (
        parameters.keys() == {"weight"}
        and weight is not None
        and weight.dim() == 1
        and weight.dtype == dtype
        and dtype in DTYPES
        and isinstance(eps_of(part), float)
        and not list(part.children())
    )


def eps_of(norm: nn.Module) -> Any:
    """Return the epsilon of a norm; None if it has no attribute with a known name."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_of(parts: Iterable[nn.Module]) -> list[Mapping[int, object]]:
    """List the forward hooks of modules, as the mappings to which the modules will also add later hooks."""
    return [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]


def with_replaced_children(part: nn.Module, replacements: Mapping[str, Forward]) -> nn.Module:
    """Copy a part and replace some of its children by functions. The copy shares its other children."""
    simplified = copy.copy(part)
    simplified._modules = dict(part._modules)
    for name, forward in replacements.items():
        child = nn.Module()
        child.forward = forward
        simplified._modules[name] = child
    return simplified


def agree(own: Forward, fused: Forward, like: torch.Tensor) -> bool:
    """Whether two functions of rows agree, except for rounding.

    Args:
        own: takes rows `[1, num_rows, num_columns]` and returns a tensor.
        fused: the replacement of `own`.
        like: `[num_columns]`, in the rows' dtype and on their device.
    """
    generator = torch.Generator().manual_seed(0)
    num_different, num_elements = 0, 0
    for num_rows in _NUM_ROWS:
        rows = _random_rows(num_rows, generator, like)
        expected, got = own(rows), fused(rows)
        if not isinstance(expected, torch.Tensor) or (got.shape, got.dtype) != (expected.shape, expected.dtype):
            return False
        expected_float64 = expected.double()
        tolerance = max(_FLOAT32_TOLERANCE, _ROUNDINGS * torch.finfo(like.dtype).eps)
        bound = tolerance * expected_float64.abs().amax(-1, keepdim=True)
        if not bool(((got.double() - expected_float64).abs() <= bound).all()):
            return False
        num_different += int((got != expected).sum())
        num_elements += got.numel()
    return like.dtype == torch.float32 or num_different <= _MAX_DIFFERENT_SHARE * num_elements


def _random_rows(num_rows: int, generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    magnitudes = 10.0 ** (torch.arange(num_rows) % _NUM_MAGNITUDES - 3)  # [num_rows]
    return (magnitudes[:, None] * torch.randn(1, num_rows, like.shape[0], generator=generator)).to(like)


def rows_agree(function: Forward, like: torch.Tensor) -> bool:
    """Whether each row of a function's result is bitwise identical alone, with some other rows, and with all rows.

    Args:
        function: takes rows `[1, num_rows, num_columns]` and returns a tensor with the same number of rows.
        like: `[num_columns]`, in the rows' dtype and on their device.
    """
    num_rows = max(_NUM_ROWS)
    rows = _random_rows(num_rows, torch.Generator().manual_seed(1), like)
    whole = function(rows)
    selections = [slice(num_rows), *(slice(i, i + 1) for i in range(num_rows)), slice(3, None)]
    return all(torch.equal(function(rows[:, selection]), whole[:, selection]) for selection in selections)


def is_close(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether results agree, except for the order of their sums and the rounding in between. False for NaN."""
    bound = _SUM_TOLERANCE[expected.dtype] * expected.abs().max()
    return expected.shape == got.shape and bool((expected - got).abs().max() <= bound)


def require(agrees: bool) -> None:
    """Refuse a replacement that does not agree with its part.

    Raises:
        Refused: `agrees` is false.
    """
    if not agrees:
        raise Refused("it computes something else")


class ReplacedMethods:
    """Replaces a method of some parts of a model.

    Args:
        name: name of the method.
        replacements: the function that replaces the method of each part.
    """

    def __init__(self, name: str, replacements: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self._name = name
        self._replacements = replacements
        self._replace()

    @contextlib.contextmanager
    def originals(self) -> Iterator[None]:
        """Restore the original methods of all parts, inside the `with` block."""
        for part in self._replacements:
            del vars(part)[self._name]
        try:
            yield
        finally:
            self._replace()

    def _replace(self) -> None:
        for part, replacement in self._replacements.items():
            vars(part)[self._name] = replacement


class ReplacedParts(ReplacedMethods):
    """Replaces `forward` of known parts of a model. Nothing outside this model changes.

    A part that looks known but computes something else is not replaced, and the log names its class once. Hooks of
    children are called: while a child that a replacement would not call has hooks, the original forward pass runs.

    Args:
        module: the model, on its device and in evaluation mode.
        known_forward: returns the replacement of a part's forward pass, which is called with the part as its first
            argument; None for a part that does not look known. Raises `Refused` for a part that fails its trial, and
            may raise anything else for a part that only looks known. It is called for a part after the parts inside it.

    Attributes:
        names: names of the replaced parts.
    """

    def __init__(self, module: nn.Module, known_forward: Callable[[Any], Forward | None]) -> None:
        forwards: dict[nn.Module, Forward] = {}
        names: list[str] = []
        refused: dict[str, str] = {}  # by class
        # A layer comes after its norms. Nothing is replaced before the last trial.
        for name, part in reversed(list(module.named_modules())):
            if "forward" in vars(part):  # another library has replaced it
                continue
            try:
                with torch.inference_mode():
                    forward = known_forward(part)
            except Refused as refusal:
                refused[type(part).__name__] = str(refusal)
            except Exception as error:  # noqa: BLE001 - a compiler, or a module with another signature, may raise anything
                refused[type(part).__name__] = reason_of(error)
            else:
                if forward is not None:
                    names.append(name)
                    forwards[part] = partial(forward, part)
        self.names = tuple(reversed(names))
        for class_name, reason in refused.items():
            _log.info("%s is not replaced: %s", class_name, reason)
        super().__init__("forward", forwards)
