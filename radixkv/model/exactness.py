"""Exact mode: makes a model batch-invariant, so that the results for a token depend only on its prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from radixkv.errors import UnsupportedModel
from radixkv.kernels.cpu.gemm_trial import GemmChoice
from radixkv.kernels.cpu.row_pieces import in_row_pieces
from radixkv.kernels.cpu.row_tiles import SIZES
from radixkv.model.layers.gemm_tuner import GemmTuner, TrialBudget
from radixkv.model.layers.packed_linear import Matmul
from radixkv.model.on_gpu import exact_kernels
from radixkv.model.refusals import SERVE_FAST

T = TypeVar("T")  # the result of a trial

# Elementwise functions whose vectorized and scalar implementations in PyTorch differ, or could differ. Known to differ:
# sigmoid, gelu, softplus and mish in float32, rsqrt in half precision.
_POINTWISE = (
    *("cos", "sin", "tan", "rsqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "tanh", "erf", "erfc"),
    *("sigmoid", "logsigmoid", "silu", "gelu", "mish", "softplus", "elu", "selu", "hardswish"),
)

# On a GPU a forward pass is padded to a multiple of this many tokens, since libraries treat a single row as a vector.
_GPU_TOKENS_MULTIPLE = 16

# On a CPU, PyTorch's norms and sums of a row are bitwise identical for any number of rows from two on. Small batches
# are padded once, to a row count that matmuls can be called with, so that not every matmul has to pad them.
_SMALL_BATCH_TOKENS = tuple(size for size in SIZES if 2 <= size <= 64)


def padded_tokens(num_tokens: int, device: torch.device) -> int:
    """Return the number of tokens, including padding, of an exact forward pass over `num_tokens` tokens."""
    if device.type != "cpu":
        return -(-num_tokens // _GPU_TOKENS_MULTIPLE) * _GPU_TOKENS_MULTIPLE
    return next((size for size in _SMALL_BATCH_TOKENS if size >= num_tokens), num_tokens)


class ExactFunctions(TorchFunctionMode):
    """A context manager that replaces some of PyTorch's functions by batch-invariant ones.

    Args:
        functions: the replacements, by the function that each replaces.
    """

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the replacement of a function, or the function itself. PyTorch calls this."""
        return self._functions.get(func, func)(*args, **(kwargs or {}))


def make_exact(module: PreTrainedModel, budget: TrialBudget | None = None) -> ExactFunctions:
    """Prepare a model that is on its device for exact mode.

    In a mixture of experts, the tokens of each expert are computed separately, and the results are added in the order
    of the experts. `check_model` detects operations that are still not exact.

    Args:
        module: the model.
        budget: time for trials of matmuls, on a CPU; None for no bound.

    Returns:
        A context manager that must be entered during each forward pass.

    Raises:
        ConfigError: the model is on a GPU that the kernels do not support.
    """
    if module._can_set_experts_implementation():
        module.set_experts_implementation("eager")
    if module.device.type == "cuda":
        kernels = exact_kernels(module.device)
        matmuls = _Matmuls(module, kernels.try_tiles, kernels.linear)
        return ExactFunctions({**matmuls.functions, **kernels.row_functions})
    return ExactFunctions(
        _Matmuls(module, _trial_of_plain_matmuls(budget), _multiply).functions | pointwise_functions()
    )


class _Matmuls(Generic[T]):
    """Replacements of PyTorch's matmuls. Each shape of weight is tried once before its first matmul.

    Args:
        module: the model, for the names of its weights.
        try_weight: checks matmuls with a weight and a bias. A false result means that they are not batch-invariant.
        multiply: computes the matmul of rows with a weight, plus a bias, given the result of the trial.

    Attributes:
        functions: the replacements, for `ExactFunctions`.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        try_weight: Callable[[torch.Tensor, torch.Tensor | None], T],
        multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, T], torch.Tensor],
    ) -> None:
        self._module = module
        self._try_weight = try_weight
        self._multiply = multiply
        self._trials: dict[tuple[object, ...], T] = {}  # results, by what distinguishes weights
        self.functions: dict[Callable[..., Any], Callable[..., Any]] = {
            functional.linear: self._linear,
            torch.addmm: self._addmm,
            torch.matmul: self._matmul,
            torch.Tensor.matmul: self._matmul,
            torch.Tensor.__matmul__: self._matmul,
        }
        self._weight_addresses = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._multiply(input, weight, bias, self._trial_of(weight, bias))

    def _addmm(self, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
        return self._linear(mat1, mat2.t(), input)

    def _matmul(self, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if other.dim() != 2 or other.untyped_storage().data_ptr() not in self._weight_addresses:
            return torch.matmul(input, other)
        return self._linear(input, other.t())

    def _trial_of(self, weight: torch.Tensor, bias: torch.Tensor | None) -> T:
        key = (weight.shape, weight.dtype, weight.stride(), weight.data_ptr() % 16, bias is None)
        if key not in self._trials:
            self._trials[key] = self._try_weight(weight, bias)
        if not self._trials[key]:
            raise UnsupportedModel(
                f"{self._name_of(weight)}: no batch-invariant matmul for a weight of shape {tuple(weight.shape)} in "
                f"{weight.dtype} on this machine; {SERVE_FAST}"
            )
        return self._trials[key]

    def _name_of(self, weight: torch.Tensor) -> str:
        address = weight.data_ptr()
        names = [name for name, parameter in self._module.named_parameters() if parameter.data_ptr() == address]
        return names[0] if names else type(self._module).__name__


def _trial_of_plain_matmuls(
    budget: TrialBudget | None,
) -> Callable[[torch.Tensor, torch.Tensor | None], GemmChoice | None]:
    """Return a trial for matmuls of layers that are not packed: experts, and code that calls PyTorch directly."""
    tuner = GemmTuner(is_exact=True, budget=budget)
    return lambda weight, bias: tuner.choose(weight, bias, ("plain",))


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice: GemmChoice | None
) -> torch.Tensor:
    assert choice is not None, "`_Matmuls` refuses the weight otherwise"
    return Matmul([weight], bias, choice)(rows)


def pointwise_functions() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return replacements of PyTorch's elementwise functions, for a CPU; see `in_row_pieces`."""
    functions = {}
    for name in _POINTWISE:
        for owner in (torch, torch.Tensor, torch.special, functional, torch._C._nn):
            function = getattr(owner, name, None)
            if function is not None:
                functions[function] = _pointwise(function)
    return functions


def _pointwise(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def exact(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if rows.dim() == 0 or not rows.is_floating_point() or "out" in kwargs:
            return function(rows, *args, **kwargs)
        return in_row_pieces(function, rows, *args, **kwargs)

    return exact
